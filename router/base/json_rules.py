"""Rules for values in a client's JSON: each rule checks a value, and describes accepted values in words and as schema.

Every error names the field, the value (cut short) and the accepted values.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject

MAX_SHOWN_CHARS = 80


class Rule(Protocol):
    """A rule for the value of a field; null is handled before."""

    @property
    def wants(self) -> str:
        """Accepted values, in words."""
        ...

    @property
    def schema(self) -> JsonObject:
        """Accepted values, as JSON schema."""
        ...

    def checked(self, name: str, value: Json) -> object:
        """Return the value in the router's own form; raises RequestError (400) with the field's name."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    """A rule: an integer from `low` to `high`, inclusive; 5.0 counts, because some clients write floats only."""

    low: int
    high: int

    @property
    def wants(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    @property
    def schema(self) -> JsonObject:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def checked(self, name: str, value: Json) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise wrong(name, value, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A rule: a finite number from `low` to `high`.

    Args:
        above_low: exclude `low` itself.
        zero_below: round smaller absolute values to 0.
    """

    low: float
    high: float
    above_low: bool = False
    zero_below: float = 0.0

    @property
    def wants(self) -> str:
        if self.above_low:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"

    @property
    def schema(self) -> JsonObject:
        return {"type": "number", "exclusiveMinimum" if self.above_low else "minimum": self.low, "maximum": self.high}

    def checked(self, name: str, value: Json) -> float:
        if type(value) not in (int, float) or not self.low <= value <= self.high:  # false for NaN
            raise wrong(name, value, self.wants)
        if self.above_low and value == self.low:
            raise wrong(name, value, self.wants)
        return float(value) if abs(value) >= self.zero_below else 0.0


@dataclass(frozen=True, slots=True)
class Boolean:
    """A rule: true or false, without conversion of other values."""

    @property
    def wants(self) -> str:
        return "true or false"

    @property
    def schema(self) -> JsonObject:
        return {"type": "boolean"}

    def checked(self, name: str, value: Json) -> bool:
        if not isinstance(value, bool):
            raise wrong(name, value, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A rule: a string of valid Unicode of limited length, without the characters in `without`."""

    max_chars: int | None = None
    min_chars: int = 0
    without: str = ""

    @property
    def wants(self) -> str:
        low = f"{self.min_chars} to" if self.min_chars else "at most"
        size = "" if self.max_chars is None else f" of {low} {self.max_chars} characters"
        return f"a string{size}" + (f", without {self._without}" if self.without else "")

    @property
    def _without(self) -> str:
        return " ".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in self.without)

    @property
    def schema(self) -> JsonObject:
        longest = {} if self.max_chars is None else {"maxLength": self.max_chars}
        pattern = {"pattern": f"^[^{re.escape(self.without)}]*$"} if self.without else {}
        return {"type": "string", "minLength": self.min_chars} | longest | pattern

    def checked(self, name: str, value: Json) -> str:
        if not is_text(value):
            raise wrong(name, value, f"{self.wants}, of valid Unicode")
        fits = self.min_chars <= len(value) and (self.max_chars is None or len(value) <= self.max_chars)
        if not fits or not set(self.without).isdisjoint(value):
            raise wrong(name, value, self.wants)
        return str(value)


@dataclass(frozen=True, slots=True)
class Texts:
    """A rule: a list of nonempty strings; gives a tuple. With `or_one`, a single string stands for a list."""

    max_texts: int
    max_chars: int  # of all texts together
    or_one: bool = False

    @property
    def wants(self) -> str:
        shape = "a string or a list of up to" if self.or_one else "a list of up to"
        what = "" if self.or_one else " strings"
        return f"{shape} {self.max_texts}{what}, none of them empty, together at most {self.max_chars} characters"

    @property
    def schema(self) -> JsonObject:
        text = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        several = {"type": "array", "items": text, "maxItems": self.max_texts}
        return {"anyOf": [text, several]} if self.or_one else several

    def checked(self, name: str, value: Json) -> tuple[str, ...]:
        texts = [value] if self.or_one and isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > self.max_texts:
            raise wrong(name, value, self.wants)
        for text in texts:
            if not is_text(text) or not text:
                raise wrong(name, text, "strings of valid Unicode, none of them empty")
        num_chars = sum(map(len, texts))
        if num_chars > self.max_chars:
            raise wrong(name, value, f"at most {self.max_chars} characters in all, not {num_chars}")
        return tuple(texts)


@dataclass(frozen=True, slots=True)
class OneOf:
    """A rule: a name out of a few."""

    names: Sequence[str]

    @property
    def wants(self) -> str:
        return " or ".join(json.dumps(name) for name in self.names)

    @property
    def schema(self) -> JsonObject:
        return {"enum": list(self.names)}

    def checked(self, name: str, value: Json) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise wrong(name, value, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Anything:
    """A rule: any value, for a field without effect."""

    @property
    def wants(self) -> str:
        return "anything"

    @property
    def schema(self) -> JsonObject:
        return {}

    def checked(self, name: str, value: Json) -> Json:
        return value


@dataclass(frozen=True, slots=True)
class Only:
    """A rule: an unsupported field of the API, accepted only with neutral values; gives None."""

    neutral: tuple[Json, ...] = ()
    remedy: str = "leave it out"

    @property
    def wants(self) -> str:
        return " or ".join(map(json.dumps, self.neutral)) or "null"

    @property
    def schema(self) -> JsonObject:
        return {"enum": list(self.neutral)} if self.neutral else {"type": "null"}

    def checked(self, name: str, value: Json) -> None:
        if not any(_is_same(value, neutral) for neutral in self.neutral):
            message = f"{name} = {shown(value)} is not supported: {self.remedy}"
            raise RequestError(message, param=name, code="unsupported_value")


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
