"""From the bytes of a body to what its JSON says."""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import RequestError


def loads(text: str, **options: Any) -> Any:
    """`json.loads`, strict about numbers; raises ValueError or RecursionError."""
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
