"""What is encoded comes back equal; what is not a message is refused and never half built."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from common.base.errors import ErrorCode, WireError
from common.wire.messages.frames import MAX_FRAME_BYTES, WIRE_VERSION, _shape, decode, encode
from common.wire.messages.handoff import KVProgress
from common.wire.messages.memory import BlocksWanted, PoolRegion, PoolWanted
from common.wire.messages.worker import (
    Abort,
    Inquiry,
    LogprobBatch,
    Message,
    PrefillRequest,
    RequestFailed,
    Role,
    TokenBatch,
    WorkerReady,
)
from common.wire.values.kv_layout import MAX_GROUPS
from common.wire.values.packing import pack_floats, pack_ids, unpack_ids
from common.wire.values.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams
from tests.support.layouts import one_group, state, window
from tests.support.messages import LAYOUT, kv_offer, pool_export, prefill_request, worker_ready
from tests.wire.strategies import messages, wild_values


@given(messages())
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_noise_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


@pytest.mark.medium
@given(messages().filter(lambda message: bool(message.__struct_fields__)), st.data())
def test_a_field_with_any_other_value_is_refused_or_makes_a_message_that_may_be_sent(
    message: Message, data: st.DataObject
) -> None:
    values = msgpack.decode(encode(message))
    fields = values[1]
    fields[data.draw(st.integers(1, len(fields) - 1))] = data.draw(wild_values())
    _refused_or_real(msgpack.encode(values))


@given(messages(), st.data())
def test_a_frame_with_any_bytes_changed_is_refused_or_makes_a_message_that_may_be_sent(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    begin = data.draw(st.integers(0, len(frame)))
    frame[begin : begin + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    _refused_or_real(bytes(frame))


def _refused_or_real(frame: bytes) -> None:
    try:
        message = decode(frame)
    except WireError:
        return
    assert decode(encode(message)) == message


PROMPT = prefill_request("r", [1, 2, 3])
OFFER = kv_offer("r", [4])
EXPORT = pool_export()
[GROUP] = LAYOUT.groups
READY = worker_ready("p", Role.PREFILL)
COLUMNS = (("r", "s"), pack_ids([0, 0]), pack_ids([1, 1]), pack_ids([5, 6]), bytes(2))
BATCH = TokenBatch("p", 1, *COLUMNS)

SCORED = LogprobBatch("p", 1, *COLUMNS, pack_ids([0, 2]), pack_ids([6, 7]), pack_floats([-1.0, -0.5]))


@pytest.mark.parametrize(
    "message",
    [
        replace(PROMPT, token_ids=b"12345"),
        replace(PROMPT, token_ids=b""),
        replace(PROMPT, token_ids=pack_ids([1, -1])),
        replace(PROMPT, num_outputs=3),
        replace(PROMPT, attempt=1 << 40),
        replace(PROMPT, request_id=""),
        replace(PROMPT, request_id="a\nb"),
        replace(PROMPT, sampling=SamplingParams(max_tokens=0)),
        replace(PROMPT, sampling=SamplingParams(temperature=float("nan"))),
        replace(PROMPT, sampling=SamplingParams(top_p=1.5)),
        replace(PROMPT, sampling=SamplingParams(seed=-1)),
        replace(PROMPT, sampling=SamplingParams(stop_token_ids=tuple(range(100)))),
        replace(PROMPT, sampling=SamplingParams(grammar="a" * (MAX_GRAMMAR_CHARS + 1))),
        replace(OFFER, token_id=-1),
        replace(OFFER, block_ids=b"123"),
        replace(OFFER, generations=b""),
        replace(EXPORT, pool_id=-1),
        replace(EXPORT, memory_socket=""),
        replace(EXPORT, memory_socket="x" * 201),
        replace(EXPORT, layout=replace(LAYOUT, groups=(replace(GROUP, dtype="int4"),))),
        replace(EXPORT, layout=replace(LAYOUT, groups=(replace(GROUP, head_dim=0),))),
        replace(EXPORT, layout=replace(LAYOUT, groups=())),
        replace(EXPORT, layout=replace(LAYOUT, groups=(GROUP,) * (MAX_GROUPS + 1))),
        replace(EXPORT, layout=replace(LAYOUT, groups=(replace(GROUP, window=8),))),
        replace(EXPORT, layout=replace(LAYOUT, groups=(replace(window(4, 8), window=0),))),
        replace(EXPORT, layout=replace(LAYOUT, groups=(replace(state(), block_size=16),))),
        PoolWanted(replace(LAYOUT, groups=(GROUP, window(4, 8))), (9,)),
        PoolWanted(LAYOUT, (9, 9)),
        PoolWanted(LAYOUT, (1,)),
        PoolWanted(LAYOUT, (9,), (9,)),
        PoolWanted(LAYOUT, (9,), (1, 1)),
        PoolRegion(1, b"", (9, 9), (8, 9)),
        PoolRegion(1, b"", (9, 9), (8,)),
        BlocksWanted(()),
        BlocksWanted((-1,)),
        replace(READY, num_blocks=(9, 9)),
        replace(READY, max_model_len=0),
        replace(READY, max_batch_tokens=0),
        replace(READY, worker_id="x" * 101),
        replace(BATCH, attempts=pack_ids([0])),
        replace(BATCH, finish_reasons=bytes([0, 3])),
        replace(BATCH, output_indices=pack_ids([0, -1])),
        replace(SCORED, num_logprobs=pack_ids([1])),
        replace(SCORED, num_logprobs=pack_ids([0, 1])),
        replace(SCORED, logprob_ids=pack_ids([1, -1])),
        replace(SCORED, logprob_ids=pack_ids([1])),
        replace(SCORED, logprobs=pack_floats([-1.0, float("nan")])),
        replace(SCORED, logprobs=b"1234567"),
        KVProgress("p", 1, "r", 0, 1, pack_ids([1, 2]), pack_ids([1, 2])),
        KVProgress("p", 1, "r", 0, 2, pack_ids([1, 2]), pack_ids([1])),
        Inquiry(("r",), pack_ids([0, 1])),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_nobody_may_send_is_refused(message: Message) -> None:
    with pytest.raises(WireError, match=type(message).__name__):
        decode(encode(message))


def test_text_for_people_is_shortened_and_made_one_line() -> None:
    failed = RequestFailed("p", 1, "r", 0, ErrorCode.INTERNAL, "line\nline" + "x" * 5000)
    read = decode(encode(failed))
    assert isinstance(read, RequestFailed)
    assert read.message.startswith("line line") and len(read.message) == 1000


DEPTH = 1_000_000
HEAD = b"\x92" + msgpack.encode(WIRE_VERSION)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x91" * DEPTH, id="deep"),
        pytest.param(HEAD + b"\x91" * DEPTH, id="deep in the place of a message"),
        pytest.param(HEAD + b"\x93\x1a\xa1r" + b"\x91" * DEPTH, id="deep in a field"),
        pytest.param(HEAD + b"\x9f\x63" + b"\x91" * DEPTH, id="deep in an unknown message"),
        pytest.param(b"\x92\x05" + b"\x81\x01" * DEPTH, id="deep in another version"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="long"),
        pytest.param(HEAD + b"\xdd\xff\xff\xff\xff\x1a\xa1r\x01", id="a message of many fields"),
        pytest.param(HEAD + b"\x98\x05\xa1p\x01\xdd\xff\xff\xff\xff", id="a column of many rows"),
        pytest.param(HEAD + b"\x98\x05\xa1p\x01\x90\xc6\xff\xff\xff\xff", id="a column of many bytes"),
        pytest.param(HEAD + b"\x93\x1a\xdb\xff\xff\xff\xff", id="a long name"),
        pytest.param(HEAD + b"\x93\x1a\xa2\xff\xff\x01", id="not UTF-8"),
        pytest.param(HEAD + b"\x93\x1a\xa1r\xc7\x00\x05", id="an extension"),
        pytest.param(encode(Abort("r", 1)) + b"\0", id="a byte behind"),
        pytest.param(encode(Abort("r", 1)) * 2, id="twice"),
    ],
)
def test_a_frame_that_lies_about_its_size_is_refused_without_taking_memory(frame: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(WireError):
        decode(frame)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


@given(messages(), st.data())
def test_a_frame_cut_off_anywhere_is_refused(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(WireError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_an_error_of_a_hostile_value_is_short_and_of_one_line() -> None:
    name = "x - at `$[1][99]`\n" + "y" * 5000
    layout = replace(LAYOUT, groups=(replace(GROUP, dtype=name),))
    with pytest.raises(WireError, match=r"KVPoolExport\.layout\.groups\[0\]\.dtype: ") as error:
        decode(encode(replace(EXPORT, layout=layout)))
    assert str(error.value).isprintable() and len(str(error.value)) < 400


@pytest.mark.parametrize("ids", [[[]] * 3_000_000, [[[]] * 60_000] * 50], ids=["flat", "nested"])
def test_a_frame_full_of_lists_is_refused_before_they_are_made(ids: list[Any]) -> None:
    frame = msgpack.encode([WIRE_VERSION, [5, "p", 1, ids, b"", b"", b"", b""]])
    tracemalloc.start()
    with pytest.raises(WireError):
        decode(frame)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * len(frame)


def test_the_error_names_the_field() -> None:
    with pytest.raises(WireError, match=r"Abort\.attempt: Expected `int`, got `str`"):
        decode(msgpack.encode([WIRE_VERSION, [26, "r", "1"]]))
    with pytest.raises(WireError, match=r"Abort\.attempt: Expected `int`, got `bool`"):
        decode(msgpack.encode([WIRE_VERSION, [26, "r", True]]))
    with pytest.raises(WireError, match="Abort: Expected `array` of at least length 3, got 2"):
        decode(msgpack.encode([WIRE_VERSION, [26, "r"]]))


def test_other_versions_tags_and_sizes_are_refused() -> None:
    with pytest.raises(WireError, match=rf"wire version 9, this program speaks {WIRE_VERSION}"):
        decode(msgpack.encode([9, [26, "r", 0]]))
    with pytest.raises(WireError, match="unknown tag 99"):
        decode(msgpack.encode([WIRE_VERSION, [99]]))
    with pytest.raises(WireError, match=f"limit {MAX_FRAME_BYTES}"):
        decode(b"\0" * (MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000)  # deeply nested arrays


def test_tags_are_stable() -> None:
    assert encode(Abort("r", 1)) == msgpack.encode([WIRE_VERSION, [26, "r", 1]])


def test_the_version_follows_from_fields_at_any_depth() -> None:
    shape = _shape(PrefillRequest)
    assert {type(hint) for _, hint in shape} == {str, list}
    (sampling,) = [fields for name, fields in shape if name == "sampling"]
    assert [name for name, _ in sampling] == [*SamplingParams.__struct_fields__]
    assert ("biases", ["float"]) in sampling and ("seed", "int") in sampling
    assert dict(_shape(WorkerReady))["role"] == [("PREFILL", 1), ("DECODE", 2)]
    assert msgpack.decode(encode(Abort("r", 1)))[0] == WIRE_VERSION


def test_ids_are_four_bytes_each() -> None:
    assert unpack_ids(pack_ids([0, 1, 151_935])) == [0, 1, 151_935]
    assert len(pack_ids(range(1000))) == 4000
    with pytest.raises(ValueError, match="bytes"):
        unpack_ids(b"12345")


def test_a_prompt_of_a_million_tokens_fits_a_frame() -> None:
    request = prefill_request("r", range(1_000_000))
    assert decode(encode(request)) == request


def test_layouts_say_how_they_differ() -> None:
    ours = one_group("m", 36, 8, 128, 16, "bfloat16")
    [group] = ours.groups
    assert (group.token_bytes, group.block_bytes) == (147_456, 2_359_296)
    assert ours.differences(ours) == []
    assert ours.differences(one_group("m", 36, 8, 128, 32, "bfloat16")) == ["groups[0].block_size: 16 here, 32 there"]
    assert [group.num_places(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
