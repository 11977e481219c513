"""Typed access to the fields of a JSON object that a client sent.

An explicit null is the same as an absent field. Every complaint names the field, the value (bounded)
and what would be right.
"""

import json
import math
from typing import Any

from common.errors import RequestError

MAX_SHOWN_CHARS = 80


class Fields:
    """One JSON object; each method gives a checked value or raises RequestError (400)."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def value(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients write every number as a float
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float, *, above_low: bool = False) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise wrong(name, value, f"a number from {low:g} to {high:g}")
        if above_low and value == low:
            raise wrong(name, value, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not is_text(value):
            raise wrong(name, value, "a string of valid Unicode")
        return value

    def only(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse any other value of a field that exists in the API and not here."""
        value = self._body.get(name)
        if value is not None and not any(type(value) is type(other) and value == other for other in allowed):
            message = f"{name} = {shown(value)} is not supported: {why}"
            raise RequestError(message, param=name, code="unsupported_value")


def is_text(value: object) -> bool:
    """A string without lone surrogates, which no tokenizer takes."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """A value for an error message, cut short before it is written out."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN_CHARS]) + ("..." if len(value) > MAX_SHOWN_CHARS else "")
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)[:MAX_SHOWN_CHARS]


def wrong(name: str, value: object, wanted: str) -> RequestError:
    """The error for a field with a value it cannot have."""
    return RequestError(f"{name} = {shown(value)}: wants {wanted}", param=name)
