"""Answers of /tokenize and /detokenize to a JSON body.

Input is bounded like prompts: anything too long for a prompt is refused before work begins.
"""

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from common.settings.config import MAX_TOKENS
from router.base.json_fields import Field, Table
from router.base.json_rules import ANYTHING, BOOLEAN, string
from router.base.shapes import PromptText, Tokens
from router.requests.chat_api import write_prompt
from router.requests.chat_fields import CHAT_FIELDS, ONE_BEGINNING, TAKEN
from router.requests.completion_api import check_model, json_object
from router.text.prompts import Encoding, check_vocabulary, token_ids
from router.text.server_rules import MODEL_NAME
from router.text.tokenizer import Tokenizer

TOLD = ("count", "max_model_len", "token_strs")
"""Fields of an answer of /tokenize beside the tokens."""
MODEL = Field("model", MODEL_NAME, None, "the served model's name; another one is a 404")
STRINGS = Field("return_token_strs", BOOLEAN, False, "`token_strs`, each token as the vocabulary writes it")

TOKENIZE_FIELDS = Table(
    MODEL,
    Field("prompt", string(), None, "required"),
    Field("add_special_tokens", BOOLEAN, True, "the tokens that the model puts around a text, as BOS, are put there"),
    STRINGS,
)
TOKENIZE_CHAT_FIELDS = Table(
    MODEL,
    *(
        CHAT_FIELDS.fields[name]
        for name in (
            "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
            "add_special_tokens", "tools", "tool_choice", "reasoning_effort", "chat_template",
        )
    ),
    STRINGS,
    relations=[ONE_BEGINNING],
)  # fmt: skip
DETOKENIZE_FIELDS = Table(
    MODEL,
    Field("tokens", token_ids(MAX_TOKENS), None, "required"),
    *(Field(name, ANYTHING, None, f"{TAKEN}: an answer of /tokenize may be sent as it is") for name in TOLD),
)


def is_chat(body: Json) -> bool:
    """Tell whether a body of /tokenize has a conversation, so the model's template must run."""
    return isinstance(body, dict) and body.get("messages") is not None


def tokenize(body: Json, tokenizer: Tokenizer, max_model_len: int) -> Tokens:
    """Return the tokens of the text `prompt` or the conversation `messages`; raise RequestError.

    For a conversation, call in the main thread.
    """
    if is_chat(body):
        values = _read(TOKENIZE_CHAT_FIELDS, body, tokenizer, required="messages")
        prompt = write_prompt(values, tokenizer, max_model_len)
        text, encoding = prompt.text, Encoding(add_special_tokens=values["add_special_tokens"], mark=prompt.mark)
    else:
        values = _read(TOKENIZE_FIELDS, body, tokenizer, required="prompt")
        text, encoding = values["prompt"], Encoding(add_special_tokens=values["add_special_tokens"])
    (ids,) = tokenizer.encode([text], max_model_len, encoding)
    return {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": ids.tolist(),
        "token_strs": tokenizer.strings(ids) if values["return_token_strs"] else None,
    }


def detokenize(body: Json, tokenizer: Tokenizer, max_model_len: int) -> PromptText:
    """Return the text of `tokens`, including special tokens; raise RequestError."""
    ids = _read(DETOKENIZE_FIELDS, body, tokenizer, required="tokens")["tokens"]
    if len(ids) > max_model_len:
        message = f"{len(ids)} tokens: at most {max_model_len}, the longest text of this model; send it in parts"
        raise RequestError(message, param="tokens", code="context_length_exceeded")
    check_vocabulary("tokens", ids, tokenizer.info.vocab_size)
    return {"prompt": tokenizer.decode_prompt(ids)}


def _read(table: Table, body: Json, tokenizer: Tokenizer, required: str) -> JsonObject:
    values = table.read(json_object(body))
    check_model(values["model"], tokenizer.info.name)
    table.require(required, values)
    return values
