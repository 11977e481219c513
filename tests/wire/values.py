"""Hypothesis strategies for messages, made of what `common.wire.fields` declares."""

import dataclasses
import typing
from typing import Any

from hypothesis import strategies as st

from common.wire.fields import ID_BYTES, Codes, Length, Name, OneOf, Packed, Prose, Range, Rule
from common.wire.frames import TAGS
from common.wire.messages import (
    InquiryReply,
    KVHandoff,
    KVPoolExport,
    KVProgress,
    Message,
    PrefillRequest,
    Role,
    WorkerReady,
)

FEW = 6  # rows or ids of one message


def messages() -> st.SearchStrategy[Message]:
    """Any message that may be sent."""
    return st.one_of([messages_of(cls) for cls in TAGS.values()])


def messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of one kind; its columns are equally long."""
    return st.integers(2, FEW).flatmap(lambda length: _instances(cls, length)).map(_consistent)


def wild_values() -> st.SearchStrategy[Any]:
    """What msgpack can carry, in range or not."""
    numbers = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([-1, 0, 1, 2**31, 10**9]) | st.floats()
    scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.binary(max_size=16)
    return scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)


def _instances(cls: type[Any], length: int) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    values = [_values_of(hints[name], length) for name in cls.__dataclass_fields__]
    return st.tuples(*values).map(lambda fields: cls(*fields))


def _values_of(annotation: Any, length: int) -> st.SearchStrategy[Any]:
    if annotation is bool:
        return st.booleans()
    if hasattr(annotation, "__members__"):
        return st.sampled_from(list(annotation))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _instances(annotation, length)
    kind, rule = typing.get_args(annotation)
    if typing.get_origin(kind) is tuple:
        return st.lists(_values_of(typing.get_args(kind)[0], length), min_size=length, max_size=length).map(tuple)
    return _allowed_by(rule, kind, length)


def _allowed_by(rule: Rule, kind: type, length: int) -> st.SearchStrategy[Any]:
    printable = st.characters(codec="utf-8").filter(str.isprintable)
    match rule:
        case Range(low, high) if kind is int:
            return st.integers(int(low), int(high)) | st.integers(int(low), min(int(high), int(low) + 40))
        case Range(low, high):
            return st.floats(low, high)
        case Length(low, high):
            return st.binary(min_size=low, max_size=min(high, 40))
        case Name(low, high, ascii_only):
            characters = st.characters(min_codepoint=32, max_codepoint=126) if ascii_only else printable
            return st.text(characters, min_size=low, max_size=min(high, 20))
        case OneOf(names):
            return st.sampled_from(sorted(names))
        case Prose():
            return st.text(printable, max_size=20)
        case Packed():
            ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 40), min_size=length, max_size=length)
            return ids.map(lambda ids: b"".join(i.to_bytes(ID_BYTES, "little") for i in ids))
        case Codes(enum, _):
            return st.lists(st.sampled_from(list(enum)), min_size=length, max_size=length).map(bytes)
        case _:
            raise TypeError(f"no values for {rule!r}")


def _consistent(message: Any) -> Any:
    """The message, with fields that depend on others drawn into what those allow."""
    match message:
        case PrefillRequest() | KVHandoff():
            least = int(isinstance(message, KVHandoff))
            sampling = dataclasses.replace(message.sampling, max_tokens=max(message.sampling.max_tokens, least + 1))
            most = min(len(message.token_ids) // ID_BYTES, sampling.max_tokens) - least
            return dataclasses.replace(message, sampling=sampling, num_outputs=least + message.num_outputs % most)
        case KVProgress():
            return dataclasses.replace(message, num_tokens=max(message.num_tokens, FEW))
        case InquiryReply():
            num_rows = len(message.request_ids)
            return dataclasses.replace(message, are_here=message.are_here[:num_rows].ljust(num_rows, b"\0"))
        case KVPoolExport():
            return dataclasses.replace(message, proof_block=message.proof_block % message.num_blocks)
        case WorkerReady(role=Role.PREFILL):
            return dataclasses.replace(message, max_batch_tokens=max(message.max_batch_tokens, 1))
        case _:
            return message
