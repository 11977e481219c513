"""Order of tokens, ends, deadlines and backpressure; what happens after a loss is in `test_replay`."""

import asyncio
import random
from collections.abc import Callable

import pytest

import router.dispatch.dispatcher
import router.dispatch.scheduler
from common.base.errors import RequestError
from common.wire.messages.handoff import DecodeRequest
from common.wire.messages.worker import PrefillRequest, Role, TokenBatch
from common.wire.values.packing import pack_ids, unpack_ids
from router.dispatch.completion.choice import Delivery, Mailbox
from router.dispatch.completion.state import State
from router.placement.choice import choose
from router.placement.member import Member
from router.placement.route import Demand, Route
from router.placement.worker_pool import WorkerPool
from tests.router.bench import EOS, LENGTH, STOP, Bench, Result, result_of
from tests.support.completions import deliveries_of
from tests.support.messages import worker_ready


def test_a_request_goes_through_both_workers() -> None:
    bench = Bench()
    completion = bench.submit()
    ((to, request),) = bench.requests()
    assert to == "p0"
    assert unpack_ids(request.token_ids) == completion.spec.prompt_ids
    assert (request.attempt, request.num_outputs, request.decode_worker_id, request.decode_epoch) == (0, 0, "d0", 1)
    states = [completion.state]
    for index, worker in enumerate([bench.prefills[0], *bench.decodes * 2]):
        assert bench.prefills[0].work.outstanding_tokens == (0 if index else 4)
        bench.token(worker, completion, index, index + 1, LENGTH if index == 2 else 0)
        states.append(completion.state)
    assert states == [State.PREFILLING, State.PREFILLING, State.DECODING, State.FINISHED]
    assert result_of(completion) == Result("bcd", "length", None)
    assert bench.aborts() == []
    bench.assert_idle()


def test_a_decode_worker_hears_of_a_request_before_its_prefill_worker() -> None:
    bench = Bench()
    completion = bench.submit(priority=-2, temperature=0.5)
    (first, announced), (second, request) = bench.sent
    assert (first, second) == ("d0", "p0")
    assert isinstance(announced, DecodeRequest) and isinstance(request, PrefillRequest)
    for name in ("request_id", "attempt", "token_ids", "num_outputs", "sampling", "priority", "client"):
        assert getattr(announced, name) == getattr(request, name)
    bench.token(bench.prefills[0], completion, 0, 1)
    bench.lose(bench.decodes[0])
    bench.join("d0", Role.DECODE, epoch=2)
    [again] = [message for _, message in bench.sent[2:] if isinstance(message, DecodeRequest)]
    assert (again.attempt, again.num_outputs, unpack_ids(again.token_ids)[-1]) == (1, 1, 1)


def test_a_decode_worker_hears_nothing_of_a_request_of_which_nothing_is_decoded() -> None:
    bench = Bench()
    bench.submit(max_tokens=1)
    bench.submit(num_prompt_logprobs=1, prompt_only=True)
    bench.lose(bench.prefills[0])
    bench.submit()
    assert len(bench.requests()) == 5, "the decode worker computes prompts itself"
    assert not [message for _, message in bench.sent if isinstance(message, DecodeRequest)]


def test_a_decode_worker_is_told_when_the_first_token_ends_a_text() -> None:
    bench = Bench()
    ended, going_on = bench.submit(), bench.submit()
    bench.token(bench.prefills[0], ended, 0, EOS, STOP)
    bench.token(bench.prefills[0], going_on, 0, 1)
    assert bench.aborts() == [("d0", ended.spec.request_id, 0)]
    bench.token(bench.decodes[0], going_on, 1, EOS, STOP)
    single = bench.submit(max_tokens=1)
    bench.token(bench.prefills[0], single, 0, 1, LENGTH)
    assert len(bench.aborts()) == 1, "who decodes knows the end, or was never told of the request"
    bench.assert_idle()


def test_a_worker_learns_how_long_a_request_has_waited_for_a_token() -> None:
    bench = Bench(num_prefill=0)
    bench.decodes[0].draining = True
    bench.submit(num_prompt_tokens=200)
    bench.now_s += 1.5
    bench.decodes[0].draining = False
    bench.join("p0", Role.PREFILL)
    bench.now_s += 0.5
    bench.lose(bench.pool.get("p0", 1) or pytest.fail("gone"))
    assert [(to, request.waited_ms) for to, request in bench.requests()] == [("p0", 1500), ("d0", 2000)]
    [completion] = bench.dispatcher.lifecycle.active.values()
    bench.now_s += 60.0
    bench.token(bench.decodes[0], completion, 0, 1)
    bench.now_s += 60.0
    bench.join("d1", Role.DECODE)
    bench.lose(bench.decodes[0])
    _, again = bench.requests()[2]
    assert (again.num_outputs, again.waited_ms) == (1, 0), "a stream has not waited all its life"


def test_a_short_prompt_overtakes_what_waits_for_a_window_and_says_whose_turn_it_is() -> None:
    bench = Bench()
    longs = [bench.submit(num_prompt_tokens=200) for _ in range(3)]
    shorts = [bench.submit(num_prompt_tokens=60) for _ in range(3)]
    assert [request.request_id for _, request in bench.requests()] == [
        c.spec.request_id for c in [longs[0], *shorts[:2]]
    ], "beside its window of 200 tokens the worker gets a step's worth, 100, ahead of their turn"
    turns = [request.turn for _, request in bench.requests()]
    assert turns[0] < turns[1] < turns[2]
    bench.token(bench.prefills[0], shorts[0], 0, 1)
    assert shorts[2].state is State.PREFILLING
    bench.token(bench.prefills[0], longs[0], 0, 1)
    assert [longs[1].state, longs[2].state] == [State.PREFILLING, State.QUEUED]
    for completion in [*longs, *shorts]:
        bench.dispatcher.abort(completion)
    bench.assert_idle()
    assert not bench.prefills[0].work.overtaking


def test_prompts_of_one_length_wait_for_the_window() -> None:
    bench = Bench()
    completions = [bench.submit(num_prompt_tokens=100) for _ in range(5)]
    assert [c.state for c in completions] == [State.PREFILLING] * 2 + [State.QUEUED] * 3


def test_a_lower_priority_number_is_sent_first_and_says_so() -> None:
    bench = Bench()
    first, late, urgent = (bench.submit(200, priority=number) for number in (0, 1, -1))
    bench.token(bench.prefills[0], first, 0, 1)
    assert (urgent.state, late.state) == (State.PREFILLING, State.QUEUED)
    assert [request.priority for _, request in bench.requests()] == [0, -1]


def test_a_stop_token_is_counted_and_not_shown() -> None:
    bench = Bench()
    completion = bench.submit()
    bench.token(bench.prefills[0], completion, 0, 1)
    bench.token(bench.decodes[0], completion, 1, EOS, STOP)
    assert result_of(completion) == Result("b", "stop", None)
    assert len(completion.output.token_ids) == 2


def test_tokens_in_any_order_and_twice_give_one_text() -> None:
    for seed in range(50):
        bench = Bench()
        completion = bench.submit(max_tokens=6)
        rows = [(bench.prefills[0] if i == 0 else bench.decodes[0], i, i, LENGTH if i == 5 else 0) for i in range(6)]
        rows *= 2
        random.Random(seed).shuffle(rows)
        for worker, index, token_id, finish in rows:
            bench.token(worker, completion, index, token_id, finish)
        assert result_of(completion) == Result("abcdef", "length", None)
        bench.assert_idle()


def test_tokens_of_others_are_dropped_and_their_senders_told_to_stop() -> None:
    bench = Bench(num_decode=2)
    completion = bench.submit()
    route = bench.route(completion)
    stranger = next(worker for worker in bench.decodes if worker is not route.decode)
    bench.token(stranger, completion, 0, 9)
    bench.token(route.decode, completion, 0, 9, attempt=7)
    dead = Member(stranger.ready, 0.0)
    dead.ready = worker_ready("d0", Role.DECODE, epoch=99)
    bench.token(dead, completion, 0, 9)
    assert completion.output.token_ids == []
    assert bench.aborts() == [(stranger.id, "cmpl-1", 0), (route.decode.id, "cmpl-1", 7)]
    assert bench.metrics.registry.get_sample_value("baton_stale_tokens_total") == 3


def test_columns_of_unequal_length_change_nothing() -> None:
    bench = Bench()
    completion = bench.submit()
    one = pack_ids([0])
    with pytest.raises(ValueError, match="zip"):
        bench.reports.on_tokens(b"", TokenBatch("p0", 1, ("cmpl-1",), one, one, pack_ids([1, 2]), b"\0"))
    assert completion.output.token_ids == []


def test_without_workers_a_request_waits_and_then_fails_with_503() -> None:
    bench = Bench(num_prefill=0, num_decode=0, worker_wait_s=60.0)
    bench.dispatcher.tick()
    patient = bench.submit()
    bench.dispatcher.tick()
    bench.now_s += 59
    bench.dispatcher.tick()
    late = bench.submit()
    bench.now_s += 2
    bench.dispatcher.tick()
    error = result_of(patient).error
    assert error is not None
    assert (error.status, error.code) == (503, "no_workers")
    assert "decode worker" in error.message
    assert late.state is State.QUEUED
    bench.join("d9", Role.DECODE)
    assert [to for to, _ in bench.requests()] == ["d9"]


def test_abort_reaches_both_workers_once() -> None:
    bench = Bench()
    completion = bench.submit()
    bench.dispatcher.abort(completion)
    bench.dispatcher.abort(completion)
    assert sorted(bench.aborts()) == [("d0", "cmpl-1", 0), ("p0", "cmpl-1", 0)]
    assert completion.state is State.ABORTED
    bench.assert_idle()


def test_a_stop_string_finishes_and_aborts() -> None:
    bench = Bench()
    completion = bench.submit(stops=["cd"])
    for i, token_id in enumerate((1, 2)):
        bench.token(bench.prefills[0] if i == 0 else bench.decodes[0], completion, i, token_id)
    assert deliveries_of(completion) == [Delivery(0, "b", 1), Delivery(0, "", 2)], "each token has its chunk"
    bench.token(bench.decodes[0], completion, 2, 3)
    assert result_of(completion) == Result("b", "stop", None)
    assert sorted(bench.aborts()) == [("d0", "cmpl-1", 0), ("p0", "cmpl-1", 0)]
    bench.assert_idle()


def test_the_request_deadline() -> None:
    bench = Bench(request_timeout_s=10.0)
    completion = bench.submit()
    bench.now_s += 10.5
    bench.dispatcher.tick()
    error = result_of(completion).error
    assert error is not None
    assert error.status == 504
    assert len(bench.aborts()) == 2
    bench.assert_idle()


def test_only_a_window_of_prompts_is_sent_ahead_so_a_new_worker_gets_its_share() -> None:
    bench = Bench()
    completions = [bench.submit(num_prompt_tokens=90) for _ in range(6)]
    assert [to for to, _ in bench.requests()] == ["p0"] * 3  # the window of 2 * 100 tokens is full
    assert bench.dispatcher.queue_sizes() == (3, 270, 3)
    bench.join("p1", Role.PREFILL)
    assert [to for to, _ in bench.requests()][3:] == ["p1"] * 3
    assert [request.request_id for _, request in bench.requests()] == [c.spec.request_id for c in completions]


def test_first_come_first_served_also_after_a_loss() -> None:
    bench = Bench()
    first, second, third = (bench.submit(num_prompt_tokens=100) for _ in range(3))
    assert third.state is State.QUEUED
    bench.decodes[0].draining = True
    bench.lose(bench.prefills[0])
    bench.sent.clear()
    bench.decodes[0].draining = False
    bench.dispatcher.scheduler.schedule()
    assert [request.request_id for _, request in bench.requests()] == [
        completion.spec.request_id for completion in (first, second, third)
    ]


def test_backpressure() -> None:
    bench = Bench(num_prefill=0, num_decode=0, max_requests=2, max_queued_tokens=100)
    bench.submit(num_prompt_tokens=60)
    with pytest.raises(RequestError) as caught:
        bench.submit(num_prompt_tokens=60)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    bench.submit(num_prompt_tokens=10)
    with pytest.raises(RequestError) as caught:
        bench.submit(num_prompt_tokens=1)
    assert caught.value.status == 429
    with pytest.raises(RequestError) as caught:
        bench.submit(num_prompt_tokens=101)
    assert caught.value.status == 400  # no retry would help
    bench.dispatcher.refusing = True
    with pytest.raises(RequestError) as caught:
        bench.submit(num_prompt_tokens=1)
    assert caught.value.status == 503


def test_what_is_too_long_for_all_that_have_room_lets_others_pass() -> None:
    bench = Bench(num_prefill=0, num_decode=0)
    bench.join("short", Role.DECODE, max_model_len=64)
    long, short = bench.submit(max_tokens=500), bench.submit()
    assert (long.state, short.state) == (State.QUEUED, State.PREFILLING)
    worker = bench.join("long", Role.DECODE, max_model_len=504)
    assert bench.route(long).decode is worker
    bench.lose(worker)
    bench.dispatcher.tick()
    bench.now_s += 59
    bench.dispatcher.tick()
    assert long.state is State.QUEUED, "another may come"
    bench.now_s += 1
    bench.dispatcher.tick()
    error = result_of(long).error
    assert error is not None
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "504 tokens" in error.message and "no worker takes more than 64" in error.message


def test_many_at_once_take_several_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (router.dispatch.dispatcher, router.dispatch.scheduler):
        monkeypatch.setattr(module, "MAX_AT_ONCE", 3)
    bench = Bench(num_prefill=1, num_decode=0)
    later: list[Callable[[], None]] = []
    bench.dispatcher.scheduler.defer = later.append
    completions = [bench.submit(num_prompt_tokens=1) for _ in range(8)]
    bench.join("d0", Role.DECODE)
    assert (len(bench.requests()), len(later)) == (0, 1), "whatever calls for it, and however often"
    for num_started in (3, 6, 8):
        later.pop()()
        assert len(bench.requests()) == num_started
    assert later == []
    bench.dispatcher.abort(*completions)
    for num_left in (5, 2):
        assert bench.dispatcher.num_active == num_left
        later.pop()()
    assert bench.dispatcher.num_active == 0
    assert later == []
    bench.assert_idle()


def test_where_nobody_has_room_no_pair_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_prefill=3, num_decode=3)
    for _ in range(30):
        bench.submit(num_prompt_tokens=90)
    assert bench.dispatcher.queue_sizes()[0] > 10
    demands = list[Demand]()

    def counted(pool: WorkerPool, demand: Demand) -> Route | None:
        demands.append(demand)
        return choose(pool, demand)

    monkeypatch.setattr("router.placement.choice.Pairing", lambda *_: pytest.fail("there is none"))
    monkeypatch.setattr("router.dispatch.scheduler.choose", counted)
    bench.dispatcher.scheduler.schedule()
    assert len(demands) == 2, "whose turn it is, and who asks for nothing but a place"


async def test_a_mailbox_loses_nothing_whoever_comes_first() -> None:
    mailbox = Mailbox()
    mailbox.put(Delivery(0, "a"))
    mailbox.put(Delivery(0, "b"))
    assert [delivery.text for delivery in await mailbox.take()] == ["a", "b"]
    given_up = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    waiting = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(Delivery(0, "c"))
    mailbox.put(Delivery(0, "d"))
    assert [delivery.text for delivery in await waiting] == ["c", "d"]
