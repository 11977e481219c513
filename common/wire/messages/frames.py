"""Conversion between messages and frames: msgpack `[version, [tag, *fields]]`, decoded and checked by msgspec.

A frame from the network is not trusted. `decode` raises `WireError` for any frame except a message of this version with
valid fields. msgspec stops at the first value of a wrong type or beyond a limit, before making a list no field has.
"""

import re
import typing
import zlib
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from common.base.errors import WireError
from common.wire.messages.worker import Message
from common.wire.values.fields import ASCII, Prose, Rule, WireStruct

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Bytes; a prompt of 1M tokens has 4 MB."""
SHOWN = Prose(300)
"""An error for the log, because the error may quote the frame."""

TAGS: dict[int, type[Message]] = {cls.__struct_config__.tag: cls for cls in typing.get_args(Message)}
"""Messages by their tags on the wire."""


class _Versioned(msgspec.Struct, array_like=True):
    """The version of a frame; the rest is skipped."""

    version: int


class _Tag(msgspec.Struct, array_like=True):
    tag: int


class _Tagged(_Versioned):
    """The version and tag of a frame; the rest is skipped."""

    head: _Tag


def _fields(cls: type) -> dict[str, Any]:
    """Return the annotated types of a struct's fields, in the order on the wire."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}  # type: ignore[attr-defined]


def _kind(annotation: Any) -> Any:
    """Return a field's type without limits."""
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, WireStruct)


def _shape(annotation: Any) -> Any:
    """Describe a type's form on the wire, by names and scalars."""
    kind = _kind(annotation)
    if _is_struct(kind):
        return [(name, _shape(field)) for name, field in _fields(kind).items()]
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return [(member.name, member.value) for member in kind]
    if typing.get_origin(kind) is tuple:
        return [_shape(typing.get_args(kind)[0])]
    return kind.__name__ if isinstance(kind, type) else list(typing.get_args(kind))


def _rules(annotation: Any, path: str = "") -> Iterator[tuple[str, Rule]]:
    """Yield the rules of a type, each with the path of its field, such as `.sampling.bad_words`."""
    yield from ((path, mark) for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Rule))
    kind = _kind(annotation)
    if _is_struct(kind):
        for name, field in _fields(kind).items():
            yield from _rules(field, f"{path}.{name}")
    elif typing.get_origin(kind) is tuple and any(_rules(typing.get_args(kind)[0])):
        raise TypeError(f"{path}: a rule for a tuple's items belongs to the tuple")


WIRE_VERSION = zlib.crc32(repr([(tag, cls.__name__, _shape(cls)) for tag, cls in sorted(TAGS.items())]).encode())
"""Checksum of all messages and fields, so programs with different messages refuse each other."""
WIRE_NAME = f"{WIRE_VERSION:08x}"
"""The version for operators: programs of any commits with equal names work together."""

_RULES = {cls: [(path[1:], attrgetter(path[1:]), rule) for path, rule in _rules(cls)] for cls in TAGS.values()}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[tuple[int, Message]] = msgspec.msgpack.Decoder(tuple[int, Message])
_BAD_FRAME = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(message: Message) -> bytes:
    """Pack a message into a frame."""
    return _ENCODER.encode((WIRE_VERSION, message))


def decode(frame: bytes) -> Message:
    """Read the message in `frame`; raises WireError with the reason for a bad frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    try:
        version, message = _DECODER.decode(frame)
    except _BAD_FRAME as error:
        raise WireError(SHOWN.checked(_reason(frame, str(error)))) from None
    if version != WIRE_VERSION:
        raise WireError(_foreign(version))
    _apply_rules(message)
    if problem := message.contradiction():
        raise WireError(f"{type(message).__name__}: {problem}")
    return message


def _apply_rules(message: Message) -> None:
    """Check fields beyond their types and limits, and shorten prose."""
    for path, get, rule in _RULES[type(message)]:
        value = get(message)
        try:
            checked = rule.checked(value)
        except WireError as error:
            raise WireError(f"{type(message).__name__}.{path}: {error}") from None
        if checked is not value:
            force_setattr(message, path, checked)


def _foreign(version: int) -> str:
    return f"wire version {version}, this program speaks {WIRE_VERSION}"


def _reason(frame: bytes, error: str) -> str:
    """Say why msgspec refused a frame: the version, the tag, or the field at the end of the error."""
    with suppress(*_BAD_FRAME):
        if (version := msgspec.msgpack.decode(frame, type=_Versioned).version) != WIRE_VERSION:
            return _foreign(version)
        tag = msgspec.msgpack.decode(frame, type=_Tagged).head.tag
        if tag not in TAGS:
            return f"unknown tag {tag}"
        problem, found, path = error.rpartition(" - at `$[1]")
        place = _place(TAGS[tag], path) if found else TAGS[tag].__name__
        return f"{place}: {problem or error}".replace(f"matching regex {ASCII!r}", "of printable ASCII characters")
    return f"not msgpack of a message: {error}"


def _place(cls: type, path: str) -> str:
    """Name the field at a path of msgspec, such as `[5][2]`; the tag stands at `[0]`."""
    place, kind, num_before = cls.__name__, typing.cast(Any, cls), 1
    for index in map(int, re.findall(r"\d+", path)):
        if _is_struct(kind):
            name, kind = [*_fields(kind).items()][index - num_before]
            place += f".{name}"
        else:
            kind = typing.get_args(kind)[0]
            place += f"[{index}]"
        kind, num_before = _kind(kind), 0
    return place
