"""What the router makes of a prompt of which a part need not be computed."""

from typing import Any

import pytest

from common.wire.messages import PrefillRequest, PromptCached, Role
from router.assignments import MAX_IN_VAIN
from router.member import Member
from router.request_state import Completion
from router.text_keys import SPAN_TOKENS
from tests.router.bench import LENGTH, Bench

ONE_POOL: dict[str, Any] = {"memory_server_id": "m", "memory_server_epoch": 1, "pool_id": 1, "prefix_min_tokens": 256}


def in_one_pool(step_tokens: int = 1000) -> Bench:
    """Two workers of one pool, with a window of two steps."""
    bench = Bench(num_prefill=0, num_decode=0)
    fields = ONE_POOL | {"num_blocks": (1000,), "max_model_len": 1 << 20, "max_num_seqs": 2000}
    bench.join("d0", Role.DECODE, **fields)
    bench.prefills.append(bench.join("p0", Role.PREFILL, **fields | {"max_batch_tokens": step_tokens}))
    return bench


def begun_by(bench: Bench) -> list[str]:
    return [request.request_id for _, request in bench.requests()]


def told(bench: Bench, worker: Member, completion: Completion, num_tokens: int, attempt: int = 0) -> None:
    message = PromptCached(worker.id, worker.epoch, completion.request_id, attempt, num_tokens)
    bench.dispatcher.on_cached(message)


def counted(bench: Bench, name: str) -> float:
    return bench.metrics.registry.get_sample_value(f"baton_{name}_prompt_tokens_total") or 0.0


def test_a_worker_has_room_for_as_much_more_and_each_token_counts_once() -> None:
    bench = Bench()
    first, second, third = (bench.submit(num_prompt_tokens=160) for _ in range(3))
    prefill = bench.prefills[0]  # of 100 tokens a step, and a window of two steps
    assert (first.route is not None, second.route is not None, third.route) == (True, True, None)
    told(bench, prefill, first, 96)
    told(bench, prefill, first, 128)
    assert prefill.outstanding_tokens == 32 + 2 * 160 and third.route is not None, "it has room for the next"
    assert (first.num_cached, counted(bench, "cached")) == (128, 128)
    for completion in (first, second, third):
        bench.token(prefill, completion, 0, 1, LENGTH)
    assert prefill.outstanding_tokens == 0
    bench.assert_idle()


@pytest.mark.parametrize("num_tokens", [160, 161, 1 << 30])
def test_no_prompt_is_all_there(num_tokens: int) -> None:
    bench = Bench()
    completion = bench.submit(num_prompt_tokens=160)
    told(bench, bench.prefills[0], completion, num_tokens)
    assert (bench.prefills[0].outstanding_tokens, completion.num_cached) == (160, 0)


def test_what_others_or_earlier_attempts_say_does_not_count_nor_what_a_replay_finds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(num_prefill=2, num_decode=2)
    completion = bench.submit(num_prompt_tokens=64)
    route = bench.route(completion)
    other = next(prefill for prefill in bench.prefills if prefill is not route.prefill)
    told(bench, other, completion, 32)
    told(bench, route.prefill, completion, 32, attempt=1)
    assert (completion.num_cached, counted(bench, "cached")) == (0, 0)
    told(bench, route.prefill, completion, 16)
    bench.token(route.prefill, completion, 0, 1)
    bench.lose(route.decode)
    route = bench.route(completion)
    told(bench, route.prefill, completion, 48, attempt=1)
    assert completion.num_cached == 16, "which is what the client hears of its prompt"
    assert counted(bench, "cached") == 16 + 48
    with caplog.at_level("INFO"):
        bench.dispatcher.abort(completion)
    assert "64 prompt tokens, 16 of 64 expected cached, 1 output tokens" in caplog.text


def test_a_prompt_goes_back_to_the_pool_that_has_its_beginning_and_what_was_expected_is_counted() -> None:
    bench = Bench(num_prefill=0, num_decode=1)
    for name in ("p0", "p1"):
        bench.join(name, Role.PREFILL, num_blocks=(1000,))
    for _ in range(3):
        completion = bench.submit(num_prompt_tokens=600, alike=True)
        route = bench.route(completion)
        bench.token(route.prefill, completion, 0, 1, LENGTH)
    requests = [(to, message) for to, message in bench.sent if isinstance(message, PrefillRequest)]
    assert len({to for to, _ in requests}) == 1
    assert counted(bench, "expected_cached") == 2 * 592, (
        "all but its last block, of which at least one token is computed"
    )


def test_a_window_holds_what_is_left_of_prompts_that_begin_as_one_that_was_sent() -> None:
    bench = in_one_pool()
    first, *others = [bench.submit(num_prompt_tokens=1100, alike=True) for _ in range(40)]
    left = 1100 - 4 * SPAN_TOKENS
    num_sent = 1 + -(-(2000 - 1100) // left) + -(-1000 // left)  # a window, and a step of those that overtake
    assert begun_by(bench) == [completion.request_id for completion in (first, *others)][:num_sent]
    assert [request.num_expected for _, request in bench.requests()] == [0, *[4 * SPAN_TOKENS] * (num_sent - 1)]
    [prefill] = bench.prefills
    assert prefill.outstanding_tokens == 1100 + (num_sent - 1) * left
    strange = bench.submit(num_prompt_tokens=1100)
    bench.token(prefill, first, 0, 1)
    for completion in [other for other in others if other.route]:
        told(bench, prefill, completion, 1088)
    assert begun_by(bench) == [completion.request_id for completion in (first, *others, strange)]
    for completion in others:
        told(bench, prefill, completion, 1088)
    assert prefill.outstanding_tokens == 39 * 12 + 1100
    assert (counted(bench, "cached"), counted(bench, "expected_cached")) == (39 * 1088, 39 * 4 * SPAN_TOKENS)
    for completion in (first, *others, strange):
        bench.dispatcher.abort(completion)
    bench.assert_idle()
    assert not prefill.overtaking


def test_what_was_expected_and_is_not_there_counts_again_wherever_it_stands() -> None:
    bench = in_one_pool(step_tokens=1400)
    [prefill] = bench.prefills
    first, long, *others = [bench.submit(num_prompt_tokens=n, alike=True) for n in (600, 4000, 600, 600)]
    assert [request.num_expected for _, request in bench.requests()] == [0, 512, 512, 512]
    assert prefill.overtaking == [88, 88], "they are shorter than what is there"
    told(bench, prefill, others[0], 0)
    assert (prefill.overtaking, prefill.outstanding_tokens) == ([88, 600], 600 + 3488 + 600 + 88)
    told(bench, prefill, long, 0)
    told(bench, prefill, others[0], 256)
    assert (prefill.overtaking, prefill.outstanding_tokens) == ([88, 344], 600 + 4000 + 344 + 88)
    assert others[0].num_cached == counted(bench, "cached") == 256
    bench.lose(prefill)
    assert all(completion.route is None or completion.route.is_local for completion in (first, long, *others))
    late = bench.join("p0", Role.PREFILL, epoch=2, **ONE_POOL | {"num_blocks": (1000,), "max_model_len": 1 << 20})
    for completion in (first, long, *others):
        bench.dispatcher.abort(completion)
    bench.assert_idle()
    assert not prefill.overtaking and not late.overtaking


def test_prompts_that_are_known_by_what_the_pool_has_room_for() -> None:
    """The latest of them, as the pool keeps those."""
    bench = in_one_pool()
    for number in range(6):
        for _ in range(2):
            completion = bench.submit(num_prompt_tokens=4096 + number, alike=True)
            bench.dispatcher.abort(completion)
    num_expected = [request.num_expected for _, request in bench.requests()]
    assert num_expected == [0, *[15 * SPAN_TOKENS] * 1, *[16 * SPAN_TOKENS] * 10]
    for _ in range(5):
        bench.dispatcher.abort(bench.submit(num_prompt_tokens=4096))
    bench.submit(num_prompt_tokens=4096, alike=True)
    assert bench.requests()[-1][1].num_expected == 0


def test_keys_are_made_only_to_count_while_something_is_found() -> None:
    bench = in_one_pool()
    [prefill] = bench.prefills

    def sent(num_tokens: int = 300) -> bool:
        completion = bench.submit(num_prompt_tokens=num_tokens, alike=True)
        bench.dispatcher.abort(completion)
        return bool(completion.texts)

    assert not sent(SPAN_TOKENS - 1), "workers do not look it up"
    assert all(sent() for _ in range(MAX_IN_VAIN)) and not sent()
    completion = bench.submit(num_prompt_tokens=300, alike=True)
    told(bench, prefill, completion, 256)
    bench.dispatcher.abort(completion)
    assert sent() and counted(bench, "cached") == 256
    bench.join("p1", Role.PREFILL)
    assert all(sent() for _ in range(2 * MAX_IN_VAIN)), "where there is another pool they say what lies where"
    bench.assert_idle()
