"""Messages <-> frames: positional msgpack `[version, tag, *fields]`, checked field by field.

A frame from the network is not trusted: `decode` raises `WireError` for anything that is not
exactly a message of this version, and never builds a message with a field of the wrong type.
"""

import dataclasses
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgpack

from common.errors import WireError
from common.wire.messages import TAGS, WIRE_VERSION, Message

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""A 1M-token prompt is 4 MB; anything above this is not ours."""

Decoder = Callable[[Any], Any]


def encode(message: Message) -> bytes:
    """One frame."""
    packed: bytes = msgpack.packb([WIRE_VERSION, _TAG_OF[type(message)], *_fields_of(message)])
    return packed


def decode(frame: bytes) -> Message:
    """The message in `frame`; raises WireError naming what is wrong with it."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    try:
        values = msgpack.unpackb(frame)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(values, list) or len(values) < 2:
        raise WireError("not an array of [version, tag, ...]")
    if values[0] != WIRE_VERSION:
        raise WireError(f"wire version {values[0]!r:.40}, this program speaks {WIRE_VERSION}")
    decoder = _DECODERS.get(values[1]) if isinstance(values[1], int) else None
    if decoder is None:
        raise WireError(f"unknown tag {values[1]!r:.40}")
    message: Message = decoder(values[2:])
    return message


def _fields_of(value: Any) -> list[Any]:
    fields = (getattr(value, name) for name in value.__dataclass_fields__)
    return [_fields_of(field) if dataclasses.is_dataclass(field) else field for field in fields]


def _decoder_for(annotation: Any) -> Decoder:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass_decoder(annotation)
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return _enum_decoder(annotation)
    if typing.get_origin(annotation) is tuple:
        return _tuple_decoder(_decoder_for(typing.get_args(annotation)[0]))
    if annotation in (bool, int, str, bytes, float):
        return _scalar_decoder(annotation)
    raise TypeError(f"no wire form for {annotation!r}")


def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    columns = [(name, _decoder_for(hints[name])) for name in cls.__dataclass_fields__]  # type: ignore[attr-defined]

    def decode_fields(values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(columns):
            raise WireError(f"{cls.__name__} wants {len(columns)} fields")
        decoded = []
        for value, (name, decoder) in zip(values, columns, strict=True):
            try:
                decoded.append(decoder(value))
            except WireError as error:
                raise WireError(f"{cls.__name__}.{name}: {error}") from None
        return cls(*decoded)

    return decode_fields


def _enum_decoder(enum: type[IntEnum]) -> Decoder:
    members = {int(member): member for member in enum}

    def decode_member(value: Any) -> IntEnum:
        if type(value) is not int or value not in members:
            raise WireError(f"{value!r:.40} is not a {enum.__name__}")
        return members[value]

    return decode_member


def _tuple_decoder(item: Decoder) -> Decoder:
    def decode_items(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise WireError(f"wants a list, got {type(value).__name__}")
        return tuple([item(element) for element in value])

    return decode_items


def _scalar_decoder(scalar: Any) -> Decoder:
    accepted = int | float if scalar is float else scalar

    def decode_scalar(value: Any) -> Any:
        if not isinstance(value, accepted) or isinstance(value, bool) is not (scalar is bool):
            raise WireError(f"wants {scalar.__name__}, got {type(value).__name__}")
        return scalar(value) if scalar is float else value

    return decode_scalar


_TAG_OF: dict[type[Message], int] = {cls: tag for tag, cls in TAGS.items()}
_DECODERS: dict[int, Decoder] = {tag: _dataclass_decoder(cls) for tag, cls in TAGS.items()}
