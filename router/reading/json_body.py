"""Parsing of a body's JSON, strict about numbers and the number of values."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from common.base.errors import RequestError
from common.base.json_file import Json

MAX_VALUES = 524_288
"""Limit for a body, because a value takes up to 100 bytes; long `id_lists` do not count."""
BEFORE_VALUES = ",:[{"
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string; without an end, all the rest."""
OUTSIDE = re.compile(r'[^"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"]*+)*+', re.DOTALL)
"""Whole strings, and the text between."""
CHUNK_CHARS = 1 << 18
"""Characters converted at once, to bound memory beside the values."""


def loads(text: str, **options: Any) -> Json:
    """Parse like `json.loads`, but refuse NaN and infinities.

    Raises ValueError or RecursionError for invalid JSON, MemoryError for too many values.
    """
    if len(text) > MAX_VALUES and _has_too_many(text):
        raise MemoryError
    return json.loads(text, parse_constant=_refuse_constant, **options)


def values_of(data: bytes | bytearray, read: Callable[[str], Json] = loads) -> Json:
    """Return the values of JSON; raise RequestError for invalid JSON. Empties a bytearray `data`."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        if isinstance(data, bytearray):
            data.clear()
        return read(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error!s:.100}", code="invalid_json") from None


def match_end(pattern: re.Pattern[str], text: str, begin: int, end: int) -> int:
    """Return the end of a match of `pattern` at `begin`, at most `end`; `begin` without a match."""
    found = pattern.match(text, begin, end)
    return begin if found is None else found.end()


def _has_too_many(text: str) -> bool:
    """Tell whether the text has too many values, counted by the characters before values.

    The first count includes strings. Only beyond the limit, parts of the text are counted again without strings.
    """
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
