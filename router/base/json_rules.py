"""Rules for values in a client's JSON: each rule checks a value, and describes accepted values in words and as schema.

Every error names the field, the value (cut short) and the accepted values.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject

if TYPE_CHECKING:
    from router.base.json_fields import Table

MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the value of a field; null is handled before.

    `checked` takes a field's name and value, and returns the value in the router's own form; raises RequestError (400).
    """

    wants: str  # accepted values, in words
    schema: JsonObject  # accepted values, as JSON schema
    checked: Callable[[str, Json], Any]
    neutral: tuple[Json, ...] | None = None  # accepted values of an unsupported field
    table: "Table | None" = None  # of an object


def plain(wants: str, schema: JsonObject, is_right: Callable[[Json], bool]) -> Rule:
    """Make a rule that gives right values as they are."""

    def checked(name: str, value: Json) -> Json:
        if not is_right(value):
            raise wrong(name, value, wants)
        return value

    return Rule(wants, schema, checked)


BOOLEAN = plain("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
ANY_OBJECT = plain("an object", {"type": "object"}, lambda value: isinstance(value, dict))
ANYTHING = plain("anything", {}, lambda _: True)
"""Rule for a field without effect."""


def integer(low: int, high: int) -> Rule:
    """Make a rule: an integer from `low` to `high`, inclusive; 5.0 counts, because some clients write floats only."""
    wants = f"an integer from {low} to {high}"

    def checked(name: str, value: Json) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, wants)
        return value

    return Rule(wants, {"type": "integer", "minimum": low, "maximum": high}, checked)


def number(low: float, high: float, *, above_low: bool = False, zero_below: float = 0.0) -> Rule:
    """Make a rule: a finite number from `low` to `high`.

    Args:
        above_low: exclude `low` itself.
        zero_below: round smaller absolute values to 0.
    """
    wants = f"a number above {low:g} and at most {high:g}" if above_low else f"a number from {low:g} to {high:g}"

    def checked(name: str, value: Json) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above_low and value == low):  # false for NaN
            raise wrong(name, value, wants)
        return float(value) if abs(value) >= zero_below else 0.0

    return Rule(
        wants, {"type": "number", "exclusiveMinimum" if above_low else "minimum": low, "maximum": high}, checked
    )


def string(max_chars: int | None = None, min_chars: int = 0, without: str = "") -> Rule:
    """Make a rule: a string of valid Unicode of limited length, without the characters in `without`."""
    low = f"{min_chars} to" if min_chars else "at most"
    forbidden = " ".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in without)
    wants = "a string" if max_chars is None else f"a string of {low} {max_chars} characters"
    wants += f", without {forbidden}" if without else ""
    schema: JsonObject = {"type": "string", "minLength": min_chars}
    schema |= {} if max_chars is None else {"maxLength": max_chars}
    schema |= {"pattern": f"^[^{re.escape(without)}]*$"} if without else {}

    def checked(name: str, value: Json) -> str:
        if not is_text(value):
            raise wrong(name, value, f"{wants}, of valid Unicode")
        fits = min_chars <= len(value) and (max_chars is None or len(value) <= max_chars)
        if not fits or not set(without).isdisjoint(value):
            raise wrong(name, value, wants)
        return str(value)

    return Rule(wants, schema, checked)


def strings(max_texts: int, max_chars: int, *, or_one: bool = False) -> Rule:
    """Make a rule: a list of nonempty strings; gives a tuple.

    Args:
        max_chars: limit of all texts together.
        or_one: a single string stands for a list.
    """
    shape = f"a string or a list of up to {max_texts}" if or_one else f"a list of up to {max_texts} strings"
    wants = f"{shape}, none of them empty, together at most {max_chars} characters"
    one = {"type": "string", "minLength": 1, "maxLength": max_chars}
    several = {"type": "array", "items": one, "maxItems": max_texts}

    def checked(name: str, value: Json) -> tuple[str, ...]:
        found = [value] if or_one and isinstance(value, str) else value
        if not isinstance(found, list) or len(found) > max_texts:
            raise wrong(name, value, wants)
        for each in found:
            if not is_text(each) or not each:
                raise wrong(name, each, "strings of valid Unicode, none of them empty")
        num_chars = sum(map(len, found))
        if num_chars > max_chars:
            raise wrong(name, value, f"at most {max_chars} characters in all, not {num_chars}")
        return tuple(found)

    return Rule(wants, {"anyOf": [one, several]} if or_one else several, checked)


def one_of(*names: str) -> Rule:
    """Make a rule: a name out of a few."""
    wants = " or ".join(json.dumps(name) for name in names)
    return plain(wants, {"enum": list(names)}, lambda value: isinstance(value, str) and value in names)


def only(*neutral: Json, remedy: str = "leave it out") -> Rule:
    """Make a rule: an unsupported field of the API, accepted only with neutral values; gives None."""
    wants = " or ".join(map(json.dumps, neutral)) or "null"

    def checked(name: str, value: Json) -> None:
        if not any(_is_same(value, each) for each in neutral):
            message = f"{name} = {shown(value)} is not supported: {remedy}"
            raise RequestError(message, param=name, code="unsupported_value")

    return Rule(wants, {"enum": list(neutral)} if neutral else {"type": "null"}, checked, neutral)


def is_text(value: object) -> bool:
    """Tell whether a value is a string without lone surrogates, which no tokenizer takes."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """Return a value for an error message, cut before formatting."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN_CHARS]) + ("..." if len(value) > MAX_SHOWN_CHARS else "")
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)[:MAX_SHOWN_CHARS]


def wrong(name: str, value: object, wanted: str) -> RequestError:
    """Make the error for a field with an unaccepted value."""
    return RequestError(f"{name} = {shown(value)}: wants {wanted}", param=name)


def _is_same(value: object, other: object) -> bool:
    """Compare as JSON: 0 equals 0.0, and false equals neither."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
