"""Special tokens of a GGUF file: those of beginning and end, and what writes them."""

from common.base.json_file import JsonObject
from common.checkpoint.gguf.model_file import GGUFModel
from common.checkpoint.gguf.tokenizer import (
    BYTE_LEVEL,
    CONTROL,
    SENTENCE_PIECE,
    USER_DEFINED,
    Tokens,
    kind_of,
    read_tokens,
    word_split_of,
)

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names in tokenizer_config.json, and in a GGUF file."""
ENDS = ("eos", "eot", "eom")
SENTENCE_PIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids where a file names none."""
END_TEXTS = frozenset(
    [
        "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>",
        "<end_of_turn>", "<EOT>", "</s>",
    ]
)  # fmt: skip
"""Texts of tokens that end an answer, whether a file names them as ends or not."""


def tokenizer_config_of(model: GGUFModel) -> JsonObject:
    """Return what tokenizer_config.json would have: special tokens, use of the first, and the chat template."""
    tokens = read_tokens(model)
    named = {name: _id(model, role, tokens) for name, role in ROLES.items()}
    config: JsonObject = {name: tokens.texts[number] for name, number in named.items() if number is not None}
    template = model.text("tokenizer.chat_template")
    config |= {} if template is None else {"chat_template": template}
    return config | {"add_bos_token": _adds_begin(model)}


def end_ids_of(model: GGUFModel) -> list[int]:
    """Return the ids of tokens that end a text: those named, and those known by their text."""
    tokens = read_tokens(model)
    named = [_id(model, role, tokens) for role in ENDS]
    known = [number for number, text in tokens.of_type(CONTROL, USER_DEFINED) if text in END_TEXTS]
    return list(dict.fromkeys(number for number in (*named, *known) if number is not None))


def _adds_begin(model: GGUFModel) -> bool:
    """Tell whether each text begins with the token of beginnings."""
    told = model.flag("tokenizer.ggml.add_bos_token")
    if told is not None:
        return told
    return kind_of(model) == SENTENCE_PIECE or word_split_of(model).adds_begin


def _id(model: GGUFModel, role: str, tokens: Tokens) -> int | None:
    """Return the id of a special token; None if there is none, or none in the vocabulary."""
    number = model.whole(f"tokenizer.ggml.{role}_token_id")
    if number is None and model.text("tokenizer.ggml.model") != BYTE_LEVEL:
        number = SENTENCE_PIECE_IDS.get(role)
    return number if number is not None and 0 <= number < len(tokens.texts) else None
