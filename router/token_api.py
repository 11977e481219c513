"""/tokenize and /detokenize: a JSON body in, what it asks for out.

Bounded as prompts are: what could never be one is refused before it takes time.
"""

from typing import Any

from common.config import MAX_TOKENS
from common.errors import RequestError
from router.json_fields import Field, Table
from router.json_rules import Boolean, Only, Text
from router.openai_api import check_model, json_object
from router.prompts import Encoding, TokenIdList, check_vocabulary
from router.shapes import PromptText, Tokens
from router.tokenizer import Tokenizer

MODEL = Field("model", Text(), None, "the served model's name; another one is a 404")

TOKENIZE_FIELDS = Table(
    MODEL,
    Field("prompt", Text(), None, "required"),
    Field("add_special_tokens", Boolean(), True, "the tokens that the model puts around a text, as BOS, are put there"),
    Field("return_token_strs", Boolean(), False, "`token_strs`, each token as the vocabulary writes it"),
    Field("messages", Only((), "send a prompt")),
)
DETOKENIZE_FIELDS = Table(MODEL, Field("tokens", TokenIdList(MAX_TOKENS), None, "required"))


def tokenize(body: Any, tokenizer: Tokenizer, max_model_len: int) -> Tokens:
    """The tokens of the text `prompt`; raises RequestError."""
    values = _read(TOKENIZE_FIELDS, body, tokenizer, required="prompt")
    encoding = Encoding(add_special_tokens=values["add_special_tokens"])
    (ids,) = tokenizer.encode([values["prompt"]], max_model_len, encoding)
    return {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": ids.tolist(),
        "token_strs": tokenizer.strings(ids) if values["return_token_strs"] else None,
    }


def detokenize(body: Any, tokenizer: Tokenizer, max_model_len: int) -> PromptText:
    """The text of `tokens`, special ones included; raises RequestError."""
    ids = _read(DETOKENIZE_FIELDS, body, tokenizer, required="tokens")["tokens"]
    if len(ids) > max_model_len:
        message = f"{len(ids)} tokens: at most {max_model_len}, the longest text of this model; send it in parts"
        raise RequestError(message, param="tokens", code="context_length_exceeded")
    check_vocabulary("tokens", ids, tokenizer.info.vocab_size)
    return {"prompt": tokenizer.decode_prompt(ids)}


def _read(table: Table, body: Any, tokenizer: Tokenizer, required: str) -> dict[str, Any]:
    values = table.read(json_object(body))
    check_model(values["model"], tokenizer.info.name)
    if values[required] is None:
        wants = table.fields[required].rule.wants
        raise RequestError(f"{required} is missing: send {wants}", param=required, code="missing_field")
    return values
