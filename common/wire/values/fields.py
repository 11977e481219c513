"""Rules for the fields of messages: each rule stands beside a field's type, and decoding a frame checks the rule.

    Attempt = Annotated[int, Range(0, MAX_INT32)]

A rule's `checked` returns a value that has the right type already, or raises WireError for a forbidden value.
Facts known only to the receiver, such as the size of its pool, are for the receiver to check.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Protocol, TypeVar

from common.base.errors import WireError
from common.wire.values.output_token import MAX_LOGPROBS
from common.wire.values.packing import unpack_floats

Number = TypeVar("Number", int, float)

MAX_INT32 = (1 << 31) - 1
ID_BYTES = 4  # bytes of a packed int32 or fp32
KEY_BYTES, DIGEST_BYTES = 16, 32  # bytes; see `block_key`
SHORT_KEY_BYTES = 8  # bytes of a key in the router
MAX_EVENT_KEYS = 4096
"""Most keys in a message to the router: more would delay every stream."""
MAX_ROWS = 65_536
"""Most rows in a message, such as tokens of a step."""
MAX_SCORES = MAX_ROWS * (MAX_LOGPROBS + 1)
"""Most log-probabilities in a message."""


class Rule(Protocol):
    """A check of a field's value; every field has a rule unless its type is a boolean, an enum or a dataclass."""

    def checked(self, value: Any) -> Any:
        """Return the value, or raise WireError."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `low` to `high`, both included; NaN is in no range."""

    low: float
    high: float

    def checked(self, value: Number) -> Number:
        if not self.low <= value <= self.high:
            raise WireError(f"{value:.20g} is not in {self.low:.20g} to {self.high:.20g}")
        return value


@dataclass(frozen=True, slots=True)
class Length:
    """A number of bytes, or of items in a tuple, from `low` to `high`."""

    low: int
    high: int

    def checked(self, value: bytes) -> bytes:
        self.check(len(value))
        return value

    def check(self, length: int) -> None:
        if not self.low <= length <= self.high:
            raise WireError(f"length {length} is not in {self.low} to {self.high}")


@dataclass(frozen=True, slots=True)
class Name:
    """A name of `low` to `high` printable characters; no name is cut off, because names are compared."""

    low: int
    high: int
    ascii_only: bool = False

    def checked(self, value: str) -> str:
        if not self.low <= len(value) <= self.high or not value.isprintable() or self.ascii_only > value.isascii():
            kind = "ASCII" if self.ascii_only else "printable"
            raise WireError(f"{value!r:.40} is not a name of {self.low} to {self.high} {kind} characters")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """A name out of a few."""

    names: Collection[str]

    def checked(self, value: str) -> str:
        if value not in self.names:
            raise WireError(f"{value!r:.40} is none of {', '.join(self.names)}")
        return value


@dataclass(frozen=True, slots=True)
class Prose:
    """Text for people: excess characters are cut off and unprintable characters become spaces; no error is raised."""

    max_chars: int

    def checked(self, value: str) -> str:
        return "".join(char if char.isprintable() else " " for char in value[: self.max_chars])


@dataclass(frozen=True, slots=True)
class Source:
    """Text for programs, unchanged; a longer text raises WireError."""

    max_chars: int

    def checked(self, value: str) -> str:
        if len(value) > self.max_chars:
            raise WireError(f"a text of {len(value)} characters, at most {self.max_chars}")
        return value


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed ids (see `packing.pack_ids`), `low` to `high` of them, none negative."""

    low: int
    high: int

    def checked(self, value: bytes) -> bytes:
        num_ids, rest = divmod(len(value), ID_BYTES)
        if rest or not self.low <= num_ids <= self.high:
            raise WireError(f"{len(value)} bytes are not {self.low} to {self.high} ids of {ID_BYTES} bytes")
        if not value[ID_BYTES - 1 :: ID_BYTES].isascii():  # the sign is the highest bit of the last byte
            raise WireError("an id is negative")
        return value


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """Packed floats (see `packing.pack_floats`), at most `high`, none NaN."""

    high: int

    def checked(self, value: bytes) -> bytes:
        num_values, rest = divmod(len(value), ID_BYTES)
        if rest or num_values > self.high:
            raise WireError(f"{len(value)} bytes are not at most {self.high} numbers of {ID_BYTES} bytes")
        if any(number != number for number in unpack_floats(value)):
            raise WireError("a number is NaN")
        return value


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of `piece_bytes` bytes, at most `high` pieces."""

    piece_bytes: int
    high: int = MAX_INT32

    def checked(self, value: bytes) -> bytes:
        if len(value) % self.piece_bytes or len(value) > self.high * self.piece_bytes:
            raise WireError(f"{len(value)} bytes are not at most {self.high} pieces of {self.piece_bytes} bytes")
        return value


@dataclass(frozen=True, slots=True)
class Codes:
    """Bytes that are members of `enum`, at most `high` bytes."""

    enum: type[IntEnum]
    high: int

    def checked(self, value: bytes) -> bytes:
        if len(value) > self.high or value.translate(None, bytes(self.enum)):
            raise WireError(f"{len(value)} bytes are not at most {self.high} of {self.enum.__name__}")
        return value


Count = Annotated[int, Range(0, MAX_INT32)]
Positive = Annotated[int, Range(1, MAX_INT32)]
Total = Annotated[int, Range(0, (1 << 63) - 1)]
Seconds = Annotated[float, Range(0.0, 1e9)]
Rate = Annotated[float, Range(0.0, 1e9)]
WorkerId = Annotated[str, Name(1, 100, ascii_only=True)]
OptionalId = Annotated[str, Name(0, 100, ascii_only=True)]
RequestId = Annotated[str, Name(1, 100, ascii_only=True)]
Epoch = Annotated[int, Range(0, (1 << 63) - 1)]
Priority = Annotated[int, Range(-MAX_INT32, MAX_INT32)]
Turn = Annotated[int, Range(0, (1 << 63) - 1)]
ClientId = Annotated[int, Range(0, (1 << 63) - 1)]
ProcessId = Annotated[int, Range(1, MAX_INT32)]
Label = Annotated[str, Name(1, 200)]
OptionalLabel = Annotated[str, Name(0, 200)]
Handle = Annotated[bytes, Length(0, 256)]
Text = Annotated[str, Prose(1000)]
BlockIds = Annotated[bytes, Packed(0, MAX_INT32)]
BlockKeys = Annotated[bytes, Pieces(KEY_BYTES)]
ShortKeys = Annotated[bytes, Pieces(SHORT_KEY_BYTES, MAX_EVENT_KEYS)]
EventRuns = Annotated[bytes, Packed(0, MAX_EVENT_KEYS)]
OptionalDigest = Annotated[bytes, Length(0, DIGEST_BYTES)]
TokenIds = Annotated[bytes, Packed(1, MAX_INT32)]
Column = Annotated[bytes, Packed(0, MAX_ROWS)]
NumLogprobs = Annotated[int, Range(0, MAX_LOGPROBS + 1)]
ScoredIds = Annotated[bytes, Packed(0, MAX_SCORES)]
Scores = Annotated[bytes, PackedFloats(MAX_SCORES)]
RequestIds = Annotated[tuple[RequestId, ...], Length(0, MAX_ROWS)]
