"""What the router makes of a prompt of which a part need not be computed."""

from typing import Any

import pytest

from common.wire.messages.handoff import DecodeRequest
from common.wire.messages.worker import PrefillRequest, PromptCached, Role
from common.wire.values.block_key import short_keys_in_group
from common.wire.values.kv_layout import KVLayout
from router.dispatch.completion.state import Completion
from router.placement.member import Member
from tests.router.bench import LENGTH, Bench
from tests.support.layouts import full, state, window


def told(bench: Bench, worker: Member, completion: Completion, num_tokens: int, attempt: int = 0) -> None:
    message = PromptCached(worker.id, worker.epoch, completion.spec.request_id, attempt, num_tokens)
    bench.reports.on_cached(b"", message)


def counted(bench: Bench, name: str) -> float:
    return bench.metrics.registry.get_sample_value(f"baton_{name}_prompt_tokens_total") or 0.0


def test_a_worker_has_room_for_as_much_more_and_each_token_counts_once() -> None:
    bench = Bench()
    first, second, third = (bench.submit(num_prompt_tokens=160) for _ in range(3))
    prefill = bench.prefills[0]  # of 100 tokens a step, and a window of two steps
    assert (first.attempt.route is not None, second.attempt.route is not None, third.attempt.route) == (
        True,
        True,
        None,
    )
    told(bench, prefill, first, 96)
    told(bench, prefill, first, 128)
    assert prefill.work.outstanding_tokens == 32 + 2 * 160 and third.attempt.route is not None, (
        "it has room for the next"
    )
    assert (first.output.num_cached, counted(bench, "cached")) == (128, 128)
    for completion in (first, second, third):
        bench.token(prefill, completion, 0, 1, LENGTH)
    assert prefill.work.outstanding_tokens == 0
    bench.assert_idle()


@pytest.mark.parametrize("num_tokens", [160, 161, 1 << 30])
def test_no_prompt_is_all_there(num_tokens: int) -> None:
    bench = Bench()
    completion = bench.submit(num_prompt_tokens=160)
    told(bench, bench.prefills[0], completion, num_tokens)
    assert (bench.prefills[0].work.outstanding_tokens, completion.output.num_cached) == (160, 0)


def test_what_others_or_earlier_attempts_say_does_not_count_nor_what_a_replay_finds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(num_prefill=2, num_decode=2)
    completion = bench.submit(num_prompt_tokens=64)
    route = bench.route(completion)
    other = next(prefill for prefill in bench.prefills if prefill is not route.prefill)
    told(bench, other, completion, 32)
    told(bench, route.prefill, completion, 32, attempt=1)
    assert (completion.output.num_cached, counted(bench, "cached")) == (0, 0)
    told(bench, route.prefill, completion, 16)
    bench.token(route.prefill, completion, 0, 1)
    bench.lose(route.decode)
    route = bench.route(completion)
    told(bench, route.prefill, completion, 48, attempt=1)
    assert completion.output.num_cached == 16, "which is what the client hears of its prompt"
    assert counted(bench, "cached") == 16 + 48
    with caplog.at_level("INFO"):
        bench.dispatcher.abort(completion)
    assert "64 prompt tokens, 16 of 64 expected cached, 1 output tokens" in caplog.text


def test_a_prompt_goes_back_to_the_pool_that_has_its_beginning_and_what_was_expected_is_counted() -> None:
    bench = Bench(num_prefill=0, num_decode=0)
    for name, role in (("d0", Role.DECODE), ("p0", Role.PREFILL), ("p1", Role.PREFILL)):
        bench.join(name, role, num_blocks=(1000,))
    for _ in range(3):
        completion = bench.submit(num_prompt_tokens=600)
        route = bench.route(completion)
        bench.token(route.prefill, completion, 0, 1, LENGTH)
    requests = [(to, message) for to, message in bench.sent if isinstance(message, PrefillRequest)]
    assert len({to for to, _ in requests}) == 1
    assert counted(bench, "expected_cached") == 2 * 592, (
        "all but its last block, of which at least one token is computed"
    )
    known = [message.num_known for _, message in bench.sent if isinstance(message, DecodeRequest)]
    assert known == [0, 592, 592], "the decode worker hears what it should have by then"


def test_blocks_are_expected_where_workers_leave_them() -> None:
    layout = KVLayout("f", (full(1, 1, 1, 16, "float32"), window(16, 40), state(2)))
    bench = Bench(num_prefill=0, num_decode=0)
    fields: dict[str, Any] = {"kv_layout": layout, "num_blocks": (99, 99, 9)}
    prefill, decode = (bench.join(role.name, role, **fields) for role in (Role.PREFILL, Role.DECODE))
    [text] = bench.submit(num_prompt_tokens=160).texts

    def expected(worker: Member) -> list[list[int]]:
        """Places of each group."""
        latest = bench.pool.prefixes.contents(worker.pool)._predictions.latest
        of_groups = [short_keys_in_group(text.keys, number) for number in range(3)]
        assert sum(key in latest for keys in of_groups for key in keys) == len(latest)
        return [[place for place, key in enumerate(keys) if key in latest] for keys in of_groups]

    assert expected(prefill) == [[*range(10)], [6, 7, 8], [8]], "the last token is computed, so a block less is resumed"
    assert expected(decode) == [[*range(10)], [7, 8, 9], []]
