"""What a field of a message may hold: said once, beside its type, and checked wherever a frame is decoded.

    Attempt = Annotated[int, Range(0, MAX_INT32)]

A rule's `checked` takes a value that has the right type already and returns it; it raises WireError for
what must not come in. What only the receiver knows, such as the size of its pool, is the receiver's to check.
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
ID_BYTES = 4  # of a packed int32 or fp32
KEY_BYTES, DIGEST_BYTES = 16, 32  # by which a block is known, and of which that is made, see `block_key`
SHORT_KEY_BYTES = 8  # by which the router knows it
MAX_EVENT_KEYS = 4096
"""Blocks that one message tells the router of: more would hold up every stream."""
MAX_ROWS = 65_536
"""Rows of one message: tokens of a step, leases of a peer."""
MAX_SCORES = MAX_ROWS * (MAX_LOGPROBS + 1)
"""Log-probabilities of one message."""


class Rule(Protocol):
    """What every field has one of, unless it is a boolean, an enum or fields of its own."""

    def checked(self, value: Any) -> Any:
        """The value, or WireError."""
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
    """So many bytes, or items of a tuple."""

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
    """`low` to `high` characters that a log line can show: names are compared, so nothing is cut off."""

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
    """One of a few names."""

    names: Collection[str]

    def checked(self, value: str) -> str:
        if value not in self.names:
            raise WireError(f"{value!r:.40} is none of {', '.join(self.names)}")
        return value


@dataclass(frozen=True, slots=True)
class Prose:
    """Text for people. What is too long or would break a log line loses that, not the message."""

    max_chars: int

    def checked(self, value: str) -> str:
        return "".join(char if char.isprintable() else " " for char in value[: self.max_chars])


@dataclass(frozen=True, slots=True)
class Source:
    """Text for programs, as it is."""

    max_chars: int

    def checked(self, value: str) -> str:
        if len(value) > self.max_chars:
            raise WireError(f"a text of {len(value)} characters, at most {self.max_chars}")
        return value


@dataclass(frozen=True, slots=True)
class Packed:
    """`low` to `high` ids as `messages.pack_ids` makes them, none of them negative."""

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
    """At most `high` numbers as `packing.pack_floats` makes them, none of them NaN."""

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
    """Any number of pieces of so many bytes, or at most `high`."""

    piece_bytes: int
    high: int = MAX_INT32

    def checked(self, value: bytes) -> bytes:
        if len(value) % self.piece_bytes or len(value) > self.high * self.piece_bytes:
            raise WireError(f"{len(value)} bytes are not at most {self.high} pieces of {self.piece_bytes} bytes")
        return value


@dataclass(frozen=True, slots=True)
class Codes:
    """One member of an enum a byte."""

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
