"""What a value in a client's JSON may be: each rule checks one, and says what it wants and its JSON schema.

Every complaint names the field, the value (bounded) and what would be right.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.base.errors import RequestError

MAX_SHOWN_CHARS = 80


class Rule(Protocol):
    """What a field has one of; null never gets here."""

    @property
    def wants(self) -> str:
        """What is right, in words."""
        ...

    @property
    def schema(self) -> dict[str, Any]:
        """What is right, as JSON schema."""
        ...

    def checked(self, name: str, value: Any) -> Any:
        """The value as the rest of the router has it, or RequestError (400) naming the field."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    """From `low` to `high`, both included; 5.0 counts, as some clients write every number as a float."""

    low: int
    high: int

    @property
    def wants(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def checked(self, name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise wrong(name, value, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`.

    Args:
        above_low: leave out `low` itself.
        zero_below: a number nearer to 0 is taken for 0.
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
    def schema(self) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum" if self.above_low else "minimum": self.low, "maximum": self.high}

    def checked(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not self.low <= value <= self.high:  # NaN is in no range
            raise wrong(name, value, self.wants)
        if self.above_low and value == self.low:
            raise wrong(name, value, self.wants)
        return float(value) if abs(value) >= self.zero_below else 0.0


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false, nothing that is taken for either."""

    @property
    def wants(self) -> str:
        return "true or false"

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def checked(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(name, value, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A string of valid Unicode with so many characters, none of them of `without`."""

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
    def schema(self) -> dict[str, Any]:
        longest = {} if self.max_chars is None else {"maxLength": self.max_chars}
        pattern = {"pattern": f"^[^{re.escape(self.without)}]*$"} if self.without else {}
        return {"type": "string", "minLength": self.min_chars} | longest | pattern

    def checked(self, name: str, value: Any) -> str:
        if not is_text(value):
            raise wrong(name, value, f"{self.wants}, of valid Unicode")
        fits = self.min_chars <= len(value) and (self.max_chars is None or len(value) <= self.max_chars)
        if not fits or not set(self.without).isdisjoint(value):
            raise wrong(name, value, self.wants)
        return str(value)


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of strings, none of them empty; gives a tuple. With `or_one` a string is a list of one."""

    max_texts: int
    max_chars: int  # together
    or_one: bool = False

    @property
    def wants(self) -> str:
        shape = "a string or a list of up to" if self.or_one else "a list of up to"
        what = "" if self.or_one else " strings"
        return f"{shape} {self.max_texts}{what}, none of them empty, together at most {self.max_chars} characters"

    @property
    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        several = {"type": "array", "items": text, "maxItems": self.max_texts}
        return {"anyOf": [text, several]} if self.or_one else several

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
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
    """One of a few names."""

    names: Sequence[str]

    @property
    def wants(self) -> str:
        return " or ".join(json.dumps(name) for name in self.names)

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.names)}

    def checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise wrong(name, value, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value, for what is taken without effect."""

    @property
    def wants(self) -> str:
        return "anything"

    @property
    def schema(self) -> dict[str, Any]:
        return {}

    def checked(self, name: str, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Only:
    """A field of the API that is not implemented here: taken with the values that change nothing, which give None."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "leave it out"

    @property
    def wants(self) -> str:
        return " or ".join(map(json.dumps, self.neutral)) or "null"

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.neutral)} if self.neutral else {"type": "null"}

    def checked(self, name: str, value: Any) -> None:
        if not any(_is_same(value, neutral) for neutral in self.neutral):
            message = f"{name} = {shown(value)} is not supported: {self.remedy}"
            raise RequestError(message, param=name, code="unsupported_value")


def is_text(value: object) -> bool:
    """A string without lone surrogates, which no tokenizer takes."""
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


def _is_same(value: object, other: object) -> bool:
    """Equal as JSON: 0 is 0.0, and false is neither."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
