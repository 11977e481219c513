"""Conversion between messages and frames: positional msgpack `[version, tag, *fields]`, read field by field.

A frame from the network is not trusted. `decode` raises `WireError` for any frame except an exact message of this
version with valid fields. `decode` reads only declared fields, so a frame full of lists is refused at the first
undeclared list.
"""

import dataclasses
import typing
import zlib
from collections.abc import Callable
from enum import IntEnum
from operator import attrgetter
from typing import Any

import msgpack

from common.base.errors import WireError
from common.wire.messages.handoff import DecodeRequest, KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    MemoryHello,
    MemoryKnock,
    MemoryRefused,
    MemoryTainted,
    MemoryVisit,
    MemoryWelcome,
    PoolLeft,
    PoolRegion,
    PoolShortage,
    PoolWanted,
    PromptBlocks,
    PromptUnwanted,
    PromptWanted,
    WeightsFilled,
    WeightsProgress,
    WeightsRegion,
    WeightsWanted,
)
from common.wire.messages.memory_reports import KVEvents, MemoryHeartbeat, MemoryReady, WorkerEnded
from common.wire.messages.operator import DrainAnswer, DrainWanted, Leave, LoadReport, LoadWanted, RoleChange
from common.wire.messages.relations import contradiction
from common.wire.messages.worker import (
    Abort,
    DecodePeer,
    Heartbeat,
    Inquiry,
    InquiryReply,
    Knock,
    KVEventsWanted,
    KVPathReport,
    LogprobBatch,
    Message,
    PeerGone,
    PrefillRequest,
    PromptCached,
    PromptLogprobs,
    Refused,
    RequestFailed,
    Reregister,
    StillBound,
    TokenBatch,
    Welcome,
    WorkerGone,
    WorkerLeaving,
    WorkerReady,
)
from common.wire.values.fields import Length, Rule

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Bytes; a prompt of 1M tokens has 4 MB."""
SCALARS = (int, float, str, bytes)

TAGS: dict[int, type[Message]] = {
    1: WorkerReady,
    2: Heartbeat,
    3: WorkerLeaving,
    4: KVPathReport,
    5: TokenBatch,
    6: RequestFailed,
    7: WorkerGone,
    8: InquiryReply,
    9: LogprobBatch,
    10: PromptLogprobs,
    14: PromptCached,
    11: MemoryReady,
    12: MemoryHeartbeat,
    13: WorkerEnded,
    15: KVEvents,
    20: Welcome,
    21: Refused,
    22: Reregister,
    23: DecodePeer,
    24: PeerGone,
    25: PrefillRequest,
    26: Abort,
    27: Inquiry,
    28: StillBound,
    29: Knock,
    30: Leave,
    31: DrainWanted,
    32: DrainAnswer,
    33: KVEventsWanted,
    34: LoadWanted,
    35: LoadReport,
    36: RoleChange,
    37: DecodeRequest,
    40: KVPoolExport,
    44: KVPathResult,
    45: KVProgress,
    60: MemoryHello,
    61: WeightsWanted,
    62: WeightsRegion,
    63: WeightsProgress,
    64: WeightsFilled,
    65: MemoryRefused,
    66: MemoryWelcome,
    67: MemoryKnock,
    68: MemoryVisit,
    69: MemoryTainted,
    70: PoolWanted,
    71: PoolRegion,
    72: BlocksWanted,
    73: BlocksLeased,
    74: BlocksFreed,
    75: PoolShortage,
    76: KVOffer,
    77: KVAccepted,
    78: KVDeclined,
    79: PoolLeft,
    80: BlocksSealed,
    81: PromptWanted,
    82: PromptBlocks,
    83: KVReceived,
    84: PromptUnwanted,
}
"""Tags of messages on the wire: never renumbered, never reused."""

Reader = Callable[[msgpack.Unpacker], Any]
"""Takes a value off the unpacker, or raises WireError."""
Writer = Callable[[Any], list[Any]]
"""Turns a value into a list for msgpack."""


def _shape(annotation: Any) -> Any:
    """Describe a type's form on the wire, by names and scalars."""
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return [(name, _shape(hints[name])) for name in annotation.__dataclass_fields__]
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return [(member.name, member.value) for member in annotation]
    if isinstance(annotation, type):
        return annotation.__name__
    kind, *_ = typing.get_args(annotation)
    return [_shape(typing.get_args(kind)[0])] if typing.get_origin(kind) is tuple else _shape(kind)


WIRE_VERSION = zlib.crc32(repr([(tag, cls.__name__, _shape(cls)) for tag, cls in TAGS.items()]).encode())
"""Checksum of all messages and fields, so programs with different messages refuse each other."""
WIRE_NAME = f"{WIRE_VERSION:08x}"
"""The version for operators: programs of any commits with equal names work together."""


def encode(message: Message) -> bytes:
    """Pack a message into a frame."""
    packed: bytes = msgpack.packb([WIRE_VERSION, _TAG_OF[type(message)], *_WRITERS[type(message)](message)])
    return packed


def decode(frame: bytes) -> Message:
    """Read the message in `frame`; raises WireError with the reason for a bad frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    # Limits of 0, because declared containers are read by header and never as values.
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES, max_array_len=0, max_map_len=0, max_ext_len=0)
    try:
        unpacker.feed(frame)
        message = _read_message(unpacker)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack of a message: {error}") from None
    if unpacker.tell() != len(frame):
        raise WireError(f"{len(frame) - unpacker.tell()} bytes behind the message")
    if problem := contradiction(message):
        raise WireError(f"{type(message).__name__}: {problem}")
    return message


def _read_message(unpacker: msgpack.Unpacker) -> Message:
    num_values = unpacker.read_array_header()
    if num_values < 2:
        raise WireError("not an array of [version, tag, ...]")
    version = unpacker.unpack()
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version!r:.40}, this program speaks {WIRE_VERSION}")
    tag = unpacker.unpack()
    reader = _READERS.get(tag) if isinstance(tag, int) else None
    if reader is None:
        raise WireError(f"unknown tag {tag!r:.40}")
    message: Message = reader(unpacker, num_values - 2)
    return message


def _fields_writer(cls: type) -> Writer:
    """Make a writer for a dataclass, nested dataclasses included; types are examined once, not for each message."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = cls.__dataclass_fields__  # type: ignore[attr-defined]
    writers = [(number, writer) for number, name in enumerate(names) if (writer := _writer_for(hints[name]))]
    get = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]

    def write_fields(value: Any) -> list[Any]:
        fields = list(get(value))
        for number, writer in writers:
            fields[number] = writer(fields[number])
        return fields

    return write_fields


def _writer_for(annotation: Any) -> Writer | None:
    """Make a writer for a type; None if msgpack packs the type directly."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _fields_writer(annotation)
    kind, *_ = typing.get_args(annotation) or (annotation,)
    if typing.get_origin(kind) is not tuple or (writer := _writer_for(typing.get_args(kind)[0])) is None:
        return None
    return lambda items: [writer(item) for item in items]


def _fields_reader(cls: type) -> Callable[[msgpack.Unpacker, int], Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    columns = [(name, _reader_for(hints[name])) for name in cls.__dataclass_fields__]  # type: ignore[attr-defined]

    def read_fields(unpacker: msgpack.Unpacker, num_fields: int) -> Any:
        if num_fields != len(columns):
            raise WireError(f"{cls.__name__} wants {len(columns)} fields")
        values = []
        for name, reader in columns:
            try:
                values.append(reader(unpacker))
            except WireError as error:
                raise WireError(f"{cls.__name__}.{name}: {error}") from None
        return cls(*values)

    return read_fields


def _reader_for(annotation: Any) -> Reader:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        read_fields = _fields_reader(annotation)
        return lambda unpacker: read_fields(unpacker, unpacker.read_array_header())
    if annotation is bool or (isinstance(annotation, type) and issubclass(annotation, IntEnum)):
        return _choice_reader(annotation)
    kind, rule, *_ = typing.get_args(annotation)  # arguments of Annotated: a field without a rule is a bug
    if typing.get_origin(kind) is tuple and isinstance(rule, Length):
        return _tuple_reader(_reader_for(typing.get_args(kind)[0]), rule)
    if kind in SCALARS:
        return _scalar_reader(kind, rule)
    raise TypeError(f"no wire form for {annotation!r}")


def _choice_reader(choice: type) -> Reader:
    scalar: type = bool if choice is bool else int
    values = {scalar(value): value for value in ((False, True) if choice is bool else typing.cast(Any, choice))}

    def read_choice(unpacker: msgpack.Unpacker) -> Any:
        value = unpacker.unpack()
        if type(value) is not scalar or value not in values:
            raise WireError(f"{value!r:.40} is not a {choice.__name__}")
        return values[value]

    return read_choice


def _tuple_reader(item: Reader, length: Length) -> Reader:
    def read_items(unpacker: msgpack.Unpacker) -> tuple[Any, ...]:
        num_items = unpacker.read_array_header()
        length.check(num_items)
        return tuple([item(unpacker) for _ in range(num_items)])

    return read_items


def _scalar_reader(scalar: type, rule: Rule) -> Reader:
    checked = rule.checked

    def read_scalar(unpacker: msgpack.Unpacker) -> Any:
        value = unpacker.unpack()
        if type(value) is scalar:
            return checked(value)
        if scalar is float and type(value) is int:
            return checked(float(value))
        raise WireError(f"wants {scalar.__name__}, got {type(value).__name__}")

    return read_scalar


_TAG_OF: dict[type[Message], int] = {cls: tag for tag, cls in TAGS.items()}
_WRITERS = {cls: _fields_writer(cls) for cls in TAGS.values()}
_READERS = {tag: _fields_reader(cls) for tag, cls in TAGS.items()}
