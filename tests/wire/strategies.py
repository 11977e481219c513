"""Hypothesis strategies for messages, made of what `common.wire.values.fields` declares."""

import typing
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec import Meta
from msgspec.structs import replace

from common.wire.messages.frames import TAGS
from common.wire.messages.fronts import FrontChoice, FrontDone, FrontOrder, FrontScores, FrontTokens
from common.wire.messages.gates import GateVisit
from common.wire.messages.handoff import DecodeRequest, KVProgress
from common.wire.messages.memory import BlocksSealed, KVOffer, PromptBlocks
from common.wire.messages.memory_reports import KVEvents
from common.wire.messages.staging import StagingWanted
from common.wire.messages.worker import (
    InquiryReply,
    LogprobBatch,
    Message,
    PrefillRequest,
    PromptLogprobs,
    Role,
    TokenBatch,
    WorkerReady,
)
from common.wire.values.fields import (
    ASCII,
    KEY_BYTES,
    SHORT_KEY_BYTES,
    Codes,
    Packed,
    PackedFloats,
    Pieces,
    Printable,
    PrintableAscii,
    Prose,
    RequestId,
    Rule,
)
from common.wire.values.kv_layout import CacheKind, KVGroup, KVLayout
from common.wire.values.packing import ID_BYTES, pack_floats

FEW = 6  # rows or ids of one message
AIMED = {"num_tokens": st.integers(1, 100), "pool_id": st.integers(0, 2), "sequence": st.integers(0, 3)}
"""Values of fields that meet what is there."""


def messages() -> st.SearchStrategy[Message]:
    """Any message that may be sent."""
    return st.one_of(list(_STRATEGIES.values()))


def aimed_messages(
    speaker: tuple[str, int], peers: Sequence[tuple[str, int]], kinds: Sequence[type[Any]]
) -> st.SearchStrategy[Message]:
    """Messages that meet what is there: in the name of one worker, about few requests and workers, often of `kinds`."""
    return _aimed(st.one_of([messages(), *(_STRATEGIES[kind] for kind in kinds)]), speaker, peers)


@st.composite
def _aimed(
    draw: st.DrawFn, any_message: st.SearchStrategy[Any], speaker: tuple[str, int], peers: Sequence[tuple[str, int]]
) -> Message:
    message = draw(any_message)  # made once: what it is made of takes far longer to look through than to draw from
    changes: dict[str, Any] = {}
    for name in message.__struct_fields__:
        if name == "worker_id":
            changes["worker_id"], changes["epoch"] = draw(st.sampled_from([speaker, speaker, speaker, *peers]))
        elif name == "server_id":
            changes["server_id"], changes["epoch"] = draw(st.sampled_from(peers))
        elif name in ("decode_worker_id", "prefill_worker_id", "ended_worker_id"):
            role = name.split("_")[0]
            changes[name], changes[f"{role}_epoch"] = draw(st.sampled_from(peers))
        elif name == "request_id":
            changes["request_id"], changes["attempt"] = draw(st.sampled_from("ab")), draw(st.sampled_from([0, 0, 1]))
        elif name == "request_ids":
            changes["request_ids"] = tuple(draw(st.sampled_from("ab")) for _ in message.request_ids)
        elif name == "sampling":
            changes["sampling"] = replace(message.sampling, max_tokens=draw(st.integers(2, 40)))
        elif name in ("token_ids", "block_ids") and draw(st.booleans()):
            count = draw(st.sampled_from([1, 1, 2, 17, 40] if name == "block_ids" else [2, 17, 40]))
            changes[name] = _packed(range(count))
        elif name in AIMED:
            changes[name] = draw(AIMED[name])
    return typing.cast(Message, _consistent(replace(message, **changes)))


def wild_values() -> st.SearchStrategy[Any]:
    """What msgpack can carry, in range or not."""
    numbers = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([-1, 0, 1, 2**31, 10**9]) | st.floats()
    scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.binary(max_size=16)
    return scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)


def _messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of one kind; its columns are equally long."""
    return st.one_of([_instances(cls, length) for length in range(2, FEW)]).map(_consistent)


def _instances(cls: type[Any], length: int) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    values = [_values_of(hints[name], length) for name in cls.__struct_fields__]
    return st.tuples(*values).map(lambda fields: cls(*fields))


def _values_of(annotation: Any, length: int) -> st.SearchStrategy[Any]:
    kind, *marks = typing.get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
    limits: Any = next((mark for mark in marks if isinstance(mark, Meta)), Meta())
    rules = [mark for mark in marks if isinstance(mark, Rule)]
    if kind is bool:
        return st.booleans()
    if hasattr(kind, "__members__"):
        return st.sampled_from(list(kind))
    if hasattr(kind, "__struct_fields__"):
        return _instances(kind, length)
    if typing.get_origin(kind) is tuple:
        num_items = min(max(length, limits.min_length or 0), limits.max_length)
        item = RequestId if PrintableAscii() in rules else typing.get_args(kind)[0]
        return st.lists(_values_of(item, length), min_size=num_items, max_size=num_items).map(tuple)
    return _ruled(rules[0], limits, length) if rules else _limited(kind, limits)


def _limited(kind: type, limits: Any) -> st.SearchStrategy[Any]:
    """Values with no rule beside their limits."""
    low, high = limits.min_length or 0, limits.max_length
    if kind is int:
        return st.integers(limits.ge, limits.le) | st.integers(limits.ge, min(limits.le, limits.ge + 40))
    if kind is float:
        return st.floats(limits.ge, limits.le)
    if kind is bytes and low:  # a bad word
        return st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(_packed)
    if kind is bytes:
        return st.binary(max_size=min(high, 40))
    if limits.pattern == ASCII:
        return st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=low, max_size=20)
    return st.text(max_size=20) if limits.pattern is None else st.from_regex(limits.pattern)


def _ruled(rule: Rule, limits: Any, length: int) -> st.SearchStrategy[Any]:
    match rule:
        case Printable() | Prose():
            characters = st.characters(codec="utf-8").filter(str.isprintable)
            return st.text(characters, min_size=limits.min_length or 0, max_size=20)
        case Packed():
            ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 40), min_size=length, max_size=length)
            return ids.map(_packed)
        case Pieces(piece_bytes):
            return st.binary(min_size=length * piece_bytes, max_size=length * piece_bytes)
        case PackedFloats():
            numbers = st.floats(width=32, allow_nan=False)
            return st.lists(numbers, min_size=length, max_size=length).map(pack_floats)
        case Codes(members):
            return st.lists(st.sampled_from(members), min_size=length, max_size=length).map(bytes)
        case _:
            raise TypeError(f"no values for {rule!r}")


def _packed(ids: Iterable[int]) -> bytes:
    return b"".join(i.to_bytes(ID_BYTES, "little") for i in ids)


def _with_sound_blocks(message: Any) -> Any:
    if "generations" in message.__struct_fields__:
        message = replace(message, generations=message.block_ids)
    match message:
        case KVOffer():
            flags = bytes(-(-len(message.block_ids) // ID_BYTES // 8))
            return replace(message, are_sealed=flags, root=message.digest)
        case PromptBlocks():
            num_sealed = min(message.num_sealed, len(message.block_ids) // ID_BYTES)
            return replace(message, num_sealed=num_sealed, num_places=0)
        case BlocksSealed():
            return replace(message, keys=message.block_ids * (KEY_BYTES // ID_BYTES))
        case _:
            return message


def _consistent(message: Any) -> Any:
    """The message, with fields that depend on others drawn into what those allow."""
    message = _with_a_sound_session(_with_sound_blocks(_with_a_sound_layout(message)))
    match message:
        case PrefillRequest() | DecodeRequest():
            biases = dict(zip(message.sampling.biased_token_ids, message.sampling.biases, strict=True))
            sampling = replace(
                message.sampling,
                biased_token_ids=tuple(biases),
                biases=tuple(biases.values()),
            )
            most = min(len(message.token_ids) // ID_BYTES, sampling.max_tokens)
            return replace(message, sampling=sampling, num_outputs=message.num_outputs % most)
        case KVEvents():
            num_keys = len(message.keys) // SHORT_KEY_BYTES
            kinds = message.kinds[:num_keys].ljust(num_keys, b"\0")
            return replace(message, kinds=kinds, runs=_packed([1] * num_keys))
        case KVProgress():
            return replace(message, num_tokens=max(message.num_tokens, len(message.block_ids) // ID_BYTES))
        case InquiryReply():
            num_rows = len(message.request_ids)
            return replace(message, are_here=message.are_here[:num_rows].ljust(num_rows, b"\0"))
        case LogprobBatch():
            ones = _packed([1] * len(message.request_ids))
            return replace(message, token_ids=message.output_indices, num_logprobs=ones)
        case PromptLogprobs():
            ones = _packed([1] * (len(message.ranks) // ID_BYTES))
            return replace(message, num_logprobs=ones)
        case TokenBatch():
            return replace(message, token_ids=message.output_indices)
        case WorkerReady(role=Role.PREFILL):
            return replace(message, max_batch_tokens=max(message.max_batch_tokens, 1))
        case _:
            return message


def _with_a_sound_session(message: Any) -> Any:
    """If it begins a visit, wants staging, or is between a front and the dispatcher."""
    match message:
        case GateVisit():
            return replace(message, num_slots=min(message.num_slots, 1), slot_bytes=min(message.num_slots, 1))
        case StagingWanted():
            return replace(message, num_slots=1)
        case FrontOrder():
            biases = dict(zip(message.sampling.biased_token_ids, message.sampling.biases, strict=True))
            sampling = replace(message.sampling, biased_token_ids=tuple(biases), biases=tuple(biases.values()))
            return replace(message, sampling=sampling, choices=tuple(map(_fitting, message.choices)))
        case FrontDone():
            num_rows = len(message.tickets) // ID_BYTES
            return replace(message, have_stopped=message.have_stopped[:num_rows].ljust(num_rows, b"\0"))
        case FrontTokens():
            ones = _packed([1] * (len(message.tickets) // ID_BYTES))
            return replace(message, token_ids=message.tickets, num_logprobs=ones)
        case FrontScores():
            return replace(message, num_logprobs=_packed([1] * (len(message.ranks) // ID_BYTES)))
        case _:
            return message


def _fitting(choice: FrontChoice) -> FrontChoice:
    """A choice whose outputs are fewer than wanted."""
    return replace(choice, outputs=_packed(range(min(3, choice.max_tokens - 1))))


def _with_a_sound_layout(message: Any) -> Any:
    """If it has a layout."""
    for name in ("layout", "kv_layout"):
        if isinstance(layout := getattr(message, name, None), KVLayout):
            groups = tuple(map(_sound, layout.groups))
            message = replace(message, **{name: replace(layout, groups=groups)})
            if "num_blocks" in message.__struct_fields__:
                num_blocks = (message.num_blocks * len(groups))[: len(groups)]
                message = replace(message, num_blocks=num_blocks)
    if isinstance(floor := getattr(message, "floor", None), tuple):
        floors = (floor * len(message.num_blocks))[: len(message.num_blocks)]
        message = replace(message, floor=tuple(map(min, floors, (count - 1 for count in message.num_blocks))))
    return message


def _sound(group: KVGroup) -> KVGroup:
    """A group of its kind."""
    window = max(1, group.window) if group.kind is CacheKind.WINDOW else 0
    return replace(group, window=window, block_size=1 if group.kind is CacheKind.STATE else group.block_size)


_STRATEGIES = {cls: _messages_of(cls) for cls in TAGS.values()}
