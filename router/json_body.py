"""From the bytes of a body to what its JSON says."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import RequestError

MAX_VALUES = 524_288
"""Of a body: more than these take up to 100 bytes each, and no request has so many beside ids (`id_lists`)."""
BEFORE_VALUES = ",:[{"
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)


def loads(text: str, **options: Any) -> Any:
    """`json.loads`, strict about numbers; raises ValueError or RecursionError, or MemoryError for too many values."""
    if len(text) > MAX_VALUES and _most_values(text) > MAX_VALUES and _most_values(STRING.sub("", text)) > MAX_VALUES:
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


def _most_values(text: str) -> int:
    return sum(map(text.count, BEFORE_VALUES))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
