"""The field `prompt`: accepted shapes, and the limit of its length."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from common.wire.values.fields import MAX_INT32
from router.base.json_rules import Rule, is_text, wrong
from router.text.server_rules import TOKEN_ID

TokenIds: TypeAlias = "array[int]"
Prompt: TypeAlias = "str | array[int]"

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
MAX_CHARS_PER_TOKEN = 16
"""More than any text has on average, apart from long runs of a character."""


def _prompts(name: str, value: Json) -> list[Prompt]:
    """Return texts and arrays. Arrays of ids (see `id_lists`) were already checked at their creation."""
    if isinstance(value, str | array):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong(name, value, PROMPTS.wants)
    if type(value[0]) in (int, float):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{len(value)} prompts in one request: at most {MAX_PROMPTS}; split it", param=name)
    return [_prompt(name, prompt) for prompt in value]


def _prompt(name: str, prompt: Json) -> Prompt:
    if isinstance(prompt, array):
        return prompt
    if not isinstance(prompt, str | list):
        raise wrong(name, prompt, PROMPTS.wants)
    if not prompt:
        raise RequestError(f"{name} is empty: send at least one token", param=name)
    if isinstance(prompt, list):
        return _token_ids(name, prompt)
    if not is_text(prompt):
        raise wrong(name, prompt, "strings of valid Unicode or token ids")
    return prompt


_TEXT: JsonObject = {"type": "string", "minLength": 1}
_IDS: JsonObject = {"type": "array", "items": TOKEN_ID, "minItems": 1}
_SEVERAL = {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1, "maxItems": MAX_PROMPTS}
PROMPTS = Rule(
    f"a string, a list of token ids, or a list of up to {MAX_PROMPTS} of either",
    {"anyOf": [_TEXT, _IDS, _SEVERAL]},
    _prompts,
)
"""Rule for one or several prompts, each a text or token ids."""


def token_ids(max_ids: int, min_ids: int = 0) -> Rule:
    """Make a rule: a list of token ids; gives a tuple."""
    wants = f"a list of {f'{min_ids} to' if min_ids else 'at most'} {max_ids} token ids"

    def checked(name: str, value: Json) -> tuple[int, ...]:
        if not isinstance(value, list) or not min_ids <= len(value) <= max_ids:
            raise wrong(name, value, wants)
        return tuple(_token_ids(name, value)) if value else ()

    return Rule(wants, {"type": "array", "items": TOKEN_ID, "minItems": min_ids, "maxItems": max_ids}, checked)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Options for turning prompts into tokens."""

    add_special_tokens: bool = True  # put around a text by the model
    max_tokens: int | None = None  # kept of a longer prompt; -1: as many as leave room for the output
    keep_end: bool = True  # keep the last tokens, otherwise the first
    mark: str = ""  # inserted into forged special tokens (`control_tokens`), to be removed
    salt: str = ""  # only cache entries with an equal salt are found (`text_cache`)

    def limit(self, max_model_len: int, max_output_tokens: int) -> "Encoding":
        """Return a copy with -1 resolved; raises RequestError for more tokens than a prompt may have."""
        longest = max_model_len - 1
        if self.max_tokens == -1:
            return replace(self, max_tokens=max(1, max_model_len - max_output_tokens))
        if self.max_tokens is not None and self.max_tokens > longest:
            raise wrong("truncate_prompt_tokens", self.max_tokens, f"at most {longest}, the longest prompt")
        return self

    def cut(self, ids: TokenIds) -> TokenIds:
        """Return the tokens kept."""
        if self.max_tokens is None:
            return ids
        return ids[-self.max_tokens :] if self.keep_end else ids[: self.max_tokens]


def check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an id outside of the vocabulary; an array must not be empty."""
    most = highest(ids) if isinstance(ids, array) else max(ids, default=0)
    if most >= vocab_size:
        raise wrong(name, most, f"token ids from 0 to {vocab_size - 1}, the model's vocabulary")


def highest(ids: TokenIds) -> int:
    """Return the highest id of an array that is not empty."""
    import numpy as np  # here, because processes without arrays need no numpy

    return int(np.frombuffer(ids, np.int32).max())


def fit_max_tokens(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, usual: int = DEFAULT_MAX_TOKENS
) -> int:
    """Return the allowed output tokens: as requested, or `usual` within the room left.

    Raises RequestError for an empty prompt, or a prompt that leaves too little room.
    """
    if num_prompt_tokens == 0:
        raise RequestError("prompt is empty: it gives no tokens; send at least one", param="prompt")
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise too_long(f"{num_prompt_tokens} tokens", max_model_len)
    if max_tokens is not None and max_tokens > left:
        raise RequestError(
            f"max_tokens = {max_tokens}: prompt and output together may have {max_model_len} tokens, "
            f"and the prompt has {num_prompt_tokens}: ask for at most {left}, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(usual, left) if max_tokens is None else max_tokens


def too_long(length: str, max_model_len: int) -> RequestError:
    """Make the error for a prompt that leaves no room for an output; `length` is its length in words."""
    return RequestError(
        f"the prompt has {length}; prompt and output together may have {max_model_len} tokens: "
        f"shorten the prompt to at most {max_model_len - 1} tokens",
        param="prompt",
        code="context_length_exceeded",
    )


def _token_ids(name: str, prompt: list[Json]) -> TokenIds:
    if set(map(type, prompt)) != {int}:
        prompt = [int(each) if isinstance(each, float) and each.is_integer() else each for each in prompt]
    if set(map(type, prompt)) != {int}:
        raise RequestError(f"{name}: a list of token ids holds integers only", param=name)
    low, high = min(prompt), max(prompt)
    if low < 0 or high > MAX_INT32:
        raise wrong(name, low if low < 0 else high, f"token ids from 0 to {MAX_INT32}")
    return array("i", prompt)
