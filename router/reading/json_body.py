"""From the bytes of a body to what its JSON says."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from common.base.errors import RequestError

MAX_VALUES = 524_288
"""Of a body: more than these take up to 100 bytes each, and no request has so many beside ids (`id_lists`)."""
BEFORE_VALUES = ",:[{"
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""One that has no end is all the rest."""
OUTSIDE = re.compile(r'[^"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"]*+)*+', re.DOTALL)
"""Whole strings, and what is between them."""
CHUNK_CHARS = 1 << 18


def loads(text: str, **options: Any) -> Any:
    """`json.loads`, strict about numbers; raises ValueError or RecursionError, or MemoryError for too many values."""
    if len(text) > MAX_VALUES and _has_too_many(text):
        raise MemoryError
    return json.loads(text, parse_constant=_refuse_constant, **options)


def values_of(data: bytes | bytearray, read: Callable[[str], Any] = loads) -> Any:
    """What the JSON says; raises RequestError for what is none. Empties a `data` that can be emptied."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        if isinstance(data, bytearray):
            data.clear()
        return read(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error!s:.100}", code="invalid_json") from None


def match_end(pattern: re.Pattern[str], text: str, begin: int, end: int) -> int:
    """Where a match of `pattern` at `begin` ends, at most `end`; `begin` without one."""
    found = pattern.match(text, begin, end)
    return begin if found is None else found.end()


def _has_too_many(text: str) -> bool:
    """Values, by what stands before them: anywhere, or, looked at in parts, outside of strings."""
    if _most_values(text) <= MAX_VALUES:
        return False
    num_values = at = 0
    while at < len(text) and num_values <= MAX_VALUES:
        begin, at = at, match_end(OUTSIDE, text, at, at + CHUNK_CHARS)
        if begin == at:
            at = match_end(STRING, text, begin, len(text))
        else:
            num_values += _most_values(STRING.sub("", text[begin:at]))
    return num_values > MAX_VALUES


def _most_values(text: str) -> int:
    return sum(map(text.count, BEFORE_VALUES))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
