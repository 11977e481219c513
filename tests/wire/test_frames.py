"""What is encoded comes back equal; what is not a message is refused and never half built."""

import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WireError
from common.wire.frames import MAX_FRAME_BYTES, decode, encode
from common.wire.kv_layout import KVLayout
from common.wire.messages import TAGS, WIRE_VERSION, Abort, Message, PrefillRequest, pack_ids, unpack_ids
from common.wire.sampling_params import SamplingParams


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(-(2**63), 2**64 - 1)
    if annotation is float:
        return st.floats(allow_nan=False)
    if annotation is str:
        return st.text(st.characters(codec="utf-8"), max_size=20)
    if annotation is bytes:
        return st.binary(max_size=50)
    if typing.get_origin(annotation) is tuple:
        return st.lists(values_of(typing.get_args(annotation)[0]), max_size=4).map(tuple)
    if hasattr(annotation, "__members__"):
        return st.sampled_from(list(annotation))
    return instances_of(annotation)


def instances_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.tuples(*(values_of(hints[name]) for name in cls.__dataclass_fields__)).map(lambda fields: cls(*fields))


@given(st.one_of([instances_of(cls) for cls in TAGS.values()]))
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_noise_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


@given(
    st.sampled_from(sorted(TAGS)),
    st.lists(st.none() | st.booleans() | st.integers() | st.text() | st.binary(), max_size=8),
)
def test_a_known_tag_with_wrong_fields_is_refused(tag: int, fields: list[Any]) -> None:
    try:
        frame = msgpack.packb([WIRE_VERSION, tag, *fields])
    except OverflowError:
        return
    try:
        message = decode(frame)
    except WireError:
        return
    assert decode(encode(message)) == message, "what is accepted is a real message"


def test_the_error_names_the_field() -> None:
    with pytest.raises(WireError, match=r"Abort\.attempt: wants int, got str"):
        decode(msgpack.packb([WIRE_VERSION, 26, "r", "1"]))
    with pytest.raises(WireError, match=r"Abort\.attempt: wants int, got bool"):
        decode(msgpack.packb([WIRE_VERSION, 26, "r", True]))
    with pytest.raises(WireError, match="Abort wants 2 fields"):
        decode(msgpack.packb([WIRE_VERSION, 26, "r"]))


def test_other_versions_tags_and_sizes_are_refused() -> None:
    with pytest.raises(WireError, match=r"wire version 9, this program speaks 2"):
        decode(msgpack.packb([9, 26, "r", 0]))
    with pytest.raises(WireError, match="unknown tag 99"):
        decode(msgpack.packb([WIRE_VERSION, 99]))
    with pytest.raises(WireError, match=f"limit {MAX_FRAME_BYTES}"):
        decode(b"\0" * (MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000)  # deeply nested arrays


def test_tags_are_stable() -> None:
    assert encode(Abort("r", 1)) == msgpack.packb([2, 26, "r", 1])


def test_ids_are_four_bytes_each() -> None:
    assert unpack_ids(pack_ids([0, 1, 151_935])) == [0, 1, 151_935]
    assert len(pack_ids(range(1000))) == 4000
    with pytest.raises(ValueError, match="bytes"):
        unpack_ids(b"12345")


def test_a_prompt_of_a_million_tokens_fits_a_frame() -> None:
    request = PrefillRequest("r", 0, pack_ids(range(1_000_000)), 0, SamplingParams(), "d", 1, whole_gpu=True)
    assert decode(encode(request)) == request


def test_layouts_say_how_they_differ() -> None:
    ours = KVLayout("m", 36, 8, 128, 16, "bfloat16")
    assert (ours.token_bytes, ours.block_bytes) == (147_456, 2_359_296)
    assert ours.differences(ours) == []
    assert ours.differences(KVLayout("m", 36, 8, 128, 32, "bfloat16")) == ["block_size: 16 here, 32 there"]
    assert [ours.num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
