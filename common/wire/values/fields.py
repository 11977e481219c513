"""Types of the fields of messages: a frame is decoded only if every field keeps the limits of its type.

    Attempt = Annotated[int, Meta(ge=0, le=MAX_INT32)]

msgspec checks types and `Meta` while decoding. A `Rule` beside `Meta` checks the rest afterwards (see `frames`). Facts
known only to the receiver, such as the size of its pool, are for the receiver to check.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol, dataclass_transform, runtime_checkable

from msgspec import Meta, Struct

from common.base.errors import WireError
from common.wire.values.output_token import MAX_LOGPROBS, FinishReason
from common.wire.values.packing import ID_BYTES, unpack_floats

MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
KEY_BYTES, DIGEST_BYTES = 16, 32  # bytes; see `block_key`
SHORT_KEY_BYTES = 8  # bytes of a key in the router
MAX_EVENT_KEYS = 4096
"""Most keys in a message to the router: more would delay every stream."""
MAX_ROWS = 65_536
"""Most rows in a message, such as tokens of a step."""
MAX_SCORES = MAX_ROWS * (MAX_LOGPROBS + 1)
"""Most log-probabilities in a message."""
ASCII = r"\A[ -~]*\Z"
"""A pattern for printable ASCII characters, which are those of names."""
PRINTABLE_ASCII = bytes(range(32, 127))


@dataclass_transform(frozen_default=True)
class WireStruct(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message, with a tag, or a value inside messages: on the wire an array of the fields in order of declaration.

    A constructor checks nothing, so a sender pays for no checks. Fields with defaults may be missing at the end.
    """

    def contradiction(self) -> str:
        """Say why fields contradict each other, each valid alone; "" for a sound message."""
        return ""


@runtime_checkable
class Rule(Protocol):
    """A check of a field's value, whose type and `Meta` were checked before."""

    def checked(self, value: Any) -> Any:
        """Return the value, or raise WireError."""
        ...


@dataclass(frozen=True, slots=True)
class Printable:
    """Printable characters only."""

    def checked(self, value: str) -> str:
        if not value.isprintable():
            raise WireError(f"{value!r:.40} has unprintable characters")
        return value


@dataclass(frozen=True, slots=True)
class PrintableAscii:
    """Names of printable ASCII characters, checked all at once."""

    def checked(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if "".join(names).encode().translate(None, PRINTABLE_ASCII):
            raise WireError("a name has unprintable or other than ASCII characters")
        return names


@dataclass(frozen=True, slots=True)
class Prose:
    """Text for people: excess characters are cut off and unprintable characters become spaces; no error is raised."""

    max_chars: int

    def checked(self, value: str) -> str:
        return "".join(char if char.isprintable() else " " for char in value[: self.max_chars])


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed ids (see `packing.pack_ids`), none negative."""

    def checked(self, value: bytes) -> bytes:
        if len(value) % ID_BYTES:
            raise WireError(f"{len(value)} bytes are not ids of {ID_BYTES} bytes")
        if not value[ID_BYTES - 1 :: ID_BYTES].isascii():  # the sign is the highest bit of the last byte
            raise WireError("an id is negative")
        return value


@dataclass(frozen=True, slots=True)
class PackedLists:
    """Lists of packed ids."""

    def checked(self, lists: tuple[bytes, ...]) -> tuple[bytes, ...]:
        for value in lists:
            Packed().checked(value)
        return lists


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """Packed floats (see `packing.pack_floats`), none NaN."""

    def checked(self, value: bytes) -> bytes:
        if len(value) % ID_BYTES:
            raise WireError(f"{len(value)} bytes are not numbers of {ID_BYTES} bytes")
        if any(number != number for number in unpack_floats(value)):
            raise WireError("a number is NaN")
        return value


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of `piece_bytes` bytes."""

    piece_bytes: int

    def checked(self, value: bytes) -> bytes:
        if len(value) % self.piece_bytes:
            raise WireError(f"{len(value)} bytes are not pieces of {self.piece_bytes} bytes")
        return value


@dataclass(frozen=True, slots=True)
class Codes:
    """Bytes out of a few, which are the members of an enumeration."""

    members: bytes

    def checked(self, value: bytes) -> bytes:
        if others := value.translate(None, self.members):
            raise WireError(f"{others[0]} is none of {', '.join(map(str, self.members))}")
        return value


Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Total = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, Meta(ge=0.0, le=1e9)]
WorkerId = Annotated[str, Meta(min_length=1, max_length=100, pattern=ASCII)]
OptionalId = Annotated[str, Meta(max_length=100, pattern=ASCII)]
RequestId = Annotated[str, Meta(min_length=1, max_length=100, pattern=ASCII)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Priority = Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32)]
Turn = Annotated[int, Meta(ge=0, le=MAX_INT64)]
ClientId = Annotated[int, Meta(ge=0, le=MAX_INT64)]
ProcessId = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Label = Annotated[str, Meta(min_length=1, max_length=200), Printable()]
OptionalLabel = Annotated[str, Meta(max_length=200), Printable()]
Handle = Annotated[bytes, Meta(max_length=256)]
Text = Annotated[str, Prose(1000)]
BlockIds = Annotated[bytes, Packed()]
BlockKeys = Annotated[bytes, Pieces(KEY_BYTES)]
ShortKeys = Annotated[bytes, Meta(max_length=MAX_EVENT_KEYS * SHORT_KEY_BYTES), Pieces(SHORT_KEY_BYTES)]
EventRuns = Annotated[bytes, Meta(max_length=MAX_EVENT_KEYS * ID_BYTES), Packed()]
OptionalDigest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
TokenIds = Annotated[bytes, Meta(min_length=ID_BYTES), Packed()]
Column = Annotated[bytes, Meta(max_length=MAX_ROWS * ID_BYTES), Packed()]
FinishReasons = Annotated[bytes, Meta(max_length=MAX_ROWS), Codes(bytes(FinishReason))]
Flags = Annotated[bytes, Meta(max_length=MAX_ROWS)]
"""A byte a row, 0 for no."""
BlockFlags = Annotated[bytes, Meta(max_length=1 << 22)]
"""A bit a block (see `flags.pack_flags`)."""
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS + 1)]
ScoredIds = Annotated[bytes, Meta(max_length=MAX_SCORES * ID_BYTES), Packed()]
Scores = Annotated[bytes, Meta(max_length=MAX_SCORES * ID_BYTES), PackedFloats()]
Names = tuple[Annotated[str, Meta(min_length=1, max_length=100)], ...]
RequestIds = Annotated[Names, Meta(max_length=MAX_ROWS), PrintableAscii()]
