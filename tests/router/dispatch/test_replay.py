"""What the dispatcher does when workers, messages or attempts are lost."""

import json
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from common.base.errors import ErrorCode
from common.wire.messages.worker import SHARED_POOL, Role, TokenBatch
from common.wire.values.packing import pack_ids, unpack_ids
from router.dispatch.completion.state import Completion, State
from router.dispatch.retry_policy import MAX_RETURNS
from router.placement.member import Member
from router.text.logprobs import TokenStrings
from tests.router.bench import LENGTH, NET, TERMINAL_STATES, VOCAB, Bench, Result, decode_ids, result_of
from tests.support.completions import choice_of
from tests.support.messages import kv_path


def test_a_prefill_worker_lost_before_the_first_token() -> None:
    bench = Bench(num_prefill=2)
    completion = bench.submit()
    first = bench.route(completion).prefill
    bench.lose(first)
    other = next(worker for worker in bench.prefills if worker is not first)
    (_, (to, request)) = bench.requests()
    assert to == other.id
    assert (request.attempt, request.num_outputs) == (1, 0)
    assert bench.aborts() == [("d0", "cmpl-1", 0)]
    bench.token(other, completion, 0, 1, LENGTH)
    assert result_of(completion) == Result("b", "length", None)
    bench.assert_idle()


async def told_of(completion: Completion) -> list[float | None]:
    """The log-probability of each token of its prompt."""
    assert completion.output.prompt_log is not None
    parts = json.loads(await completion.output.prompt_log.told(TokenStrings(Mock(strings=lambda ids: [None])), 1))
    return [None if part is None else next(iter(part.values()))["logprob"] for part in parts]


async def test_a_prefill_worker_lost_amid_what_it_tells_of_a_prompt() -> None:
    bench = Bench(num_prefill=2)
    completion = bench.submit(num_prompt_tokens=8, num_prompt_logprobs=1, prompt_only=True)
    first = bench.route(completion).prefill
    bench.prompt_logprobs(first, completion, range(1, 4))
    bench.lose(first)
    (_, before), (to, request) = bench.requests()
    assert (before.num_prompt_logprobs, before.first_scored) == (1, 1)
    assert (request.num_prompt_logprobs, request.first_scored) == (1, 4)
    other = bench.pool.find(to)
    assert other is not None
    bench.prompt_logprobs(first, completion, range(4, 8), attempt=0)
    bench.prompt_logprobs(other, completion, range(1, 4))
    bench.prompt_logprobs(other, completion, range(4, 8))
    bench.token(other, completion, 0, 1, LENGTH)
    assert result_of(completion) == Result("", "length", None) and not completion.output.token_ids
    assert await told_of(completion) == [None, -1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -2.0]
    bench.assert_idle()


@pytest.mark.parametrize(
    ("positions", "ids"),
    [(range(1, 3), ()), (range(1, 4), (1, 2, 2)), (range(1, 4), (1, 2, VOCAB)), (range(1, 5), (1, 2, 3, 4))],
    ids=["too few", "another prompt", "no token", "too many"],
)
async def test_what_cannot_be_told_of_a_prompt_leads_to_a_replay(positions: range, ids: tuple[int, ...]) -> None:
    bench = Bench()
    completion = bench.submit(num_prompt_logprobs=1)
    prefill = bench.prefills[0]
    bench.prompt_logprobs(prefill, completion, positions, ids)
    if not ids:
        bench.token(prefill, completion, 0, 1)
    assert completion.attempt.number == 1 and not completion.output.token_ids
    bench.prompt_logprobs(prefill, completion, range(3 if not ids else 1, 4))
    bench.token(prefill, completion, 0, 1, LENGTH)
    assert result_of(completion) == Result("b", "length", None)
    assert None not in (await told_of(completion))[1:]
    bench.assert_idle()


def test_what_is_known_of_a_prompt_is_not_asked_again() -> None:
    bench = Bench(num_decode=2)
    completion = bench.submit(num_prompt_logprobs=2)
    bench.prompt_logprobs(bench.prefills[0], completion, range(1, 4))
    bench.token(bench.prefills[0], completion, 0, 1)
    bench.lose(bench.route(completion).decode)
    assert [request.num_prompt_logprobs for _, request in bench.requests()] == [2, 0]
    bench.token(bench.prefills[0], completion, 1, 2, LENGTH)
    assert result_of(completion) == Result("bc", "length", None)
    bench.assert_idle()


def test_a_decode_worker_lost_mid_stream_and_the_old_attempt_talking_on() -> None:
    bench = Bench(num_decode=2)
    completion = bench.submit(stops=["zz"])
    old = bench.route(completion).decode
    bench.token(bench.prefills[0], completion, 0, 1)
    bench.token(old, completion, 1, 2)
    bench.token(old, completion, 3, 4)  # ahead of a gap: lost with its attempt
    bench.lose(old)
    (_, (to, request)) = bench.requests()
    assert to == "p0"
    assert unpack_ids(request.token_ids) == [*completion.spec.prompt_ids, 1, 2]
    assert (request.attempt, request.num_outputs) == (1, 2)
    assert request.decode_worker_id != old.id
    bench.token(bench.prefills[0], completion, 2, 77, attempt=0)
    new = bench.pool.find(request.decode_worker_id)
    assert new is not None
    bench.token(bench.prefills[0], completion, 2, 3)
    bench.token(new, completion, 3, 4)
    bench.token(new, completion, 4, 5, LENGTH)
    assert result_of(completion) == Result("bcdef", "length", None)
    bench.assert_idle()


@pytest.mark.parametrize("transport", [SHARED_POOL, "shm"])
def test_what_was_handed_over_outlives_the_prefill_worker(transport: str) -> None:
    """In a memory server, from which the decode worker takes it or pulls it."""
    bench = Bench()
    bench.pool.set_path(kv_path("p0", "d0", transport=transport))
    computing, handed_over, lost, decoding = (bench.submit() for _ in range(4))
    for completion in (handed_over, lost, decoding):
        bench.token(bench.prefills[0], completion, 0, 1)
    bench.token(bench.decodes[0], decoding, 1, 2)
    assert bench.dispatcher.lifecycle.needing(bench.prefills[0]) == [computing], "it may leave without the others"
    bench.lose(bench.prefills[0])
    assert [completion.attempt.number for completion in (computing, handed_over, lost, decoding)] == [1, 0, 0, 0]
    assert bench.route(computing).is_local and decoding.state is State.DECODING
    assert handed_over.attempt.is_past_prefill, "should nothing come, the decode worker is asked"
    bench.token(bench.decodes[0], handed_over, 1, 2, LENGTH)
    assert result_of(handed_over) == Result("bc", "length", None)
    bench.lose(bench.decodes[0])
    assert lost.attempt.number == 1 and lost.state is State.QUEUED


def test_a_prefill_worker_lost_with_its_first_token() -> None:
    """The decode worker speaks, but what came before it is missing for good."""
    bench = Bench()
    completion = bench.submit()
    bench.token(bench.decodes[0], completion, 1, 2)
    assert completion.state is State.PREFILLING
    bench.lose(bench.prefills[0])
    assert completion.attempt.number == 1


def test_replays_are_bounded_and_neither_preemption_nor_a_lost_handoff_counts() -> None:
    bench = Bench(max_attempts=3)
    completion = bench.submit()
    for code in (ErrorCode.PREEMPTED, ErrorCode.HANDOFF_LOST):
        for worker in (bench.prefills[0], bench.decodes[0]):
            bench.fail(worker, completion, code)
    for _ in range(2):
        bench.fail(bench.prefills[0], completion, ErrorCode.INTERNAL)
    assert completion.state is State.PREFILLING
    assert completion.attempt.number == 6
    bench.fail(bench.decodes[0], completion, ErrorCode.INTERNAL)
    error = result_of(completion).error
    assert error is not None
    assert (error.status, error.code) == (500, "internal_error")
    bench.assert_idle()


def test_what_never_fits_is_the_clients_fault() -> None:
    bench = Bench()
    completion = bench.submit()
    bench.fail(bench.decodes[0], completion, ErrorCode.NEVER_FITS)
    error = result_of(completion).error
    assert error is not None
    assert error.status == 400
    assert ("p0", "cmpl-1", 0) in bench.aborts()


def test_a_request_without_a_token_to_choose_ends_at_once() -> None:
    bench = Bench(num_prefill=2)
    completion = bench.submit()
    bench.fail(bench.prefills[0], completion, ErrorCode.NO_CHOICE)
    error = result_of(completion).error
    assert error is not None
    assert (error.status, error.code, completion.attempt.number) == (500, "no_token_to_choose", 0)
    bench.assert_idle()


def test_a_draining_worker_is_not_asked_again() -> None:
    bench = Bench(num_prefill=2)
    completion = bench.submit()
    first = bench.route(completion).prefill
    bench.fail(first, completion, ErrorCode.DRAINING)
    assert bench.route(completion).prefill is not first
    assert completion.failures.num_counted == 0


@pytest.mark.parametrize("code", [ErrorCode.PREEMPTED, ErrorCode.INTERNAL])
def test_what_a_worker_gives_back_goes_to_another_one(code: ErrorCode) -> None:
    bench = Bench(num_decode=2)
    completions = [bench.submit() for _ in range(4)]
    for _ in range(3):
        given_back = completions.pop(0)
        full = bench.route(given_back).decode
        bench.fail(full, given_back, code)
        assert bench.route(given_back).decode is not full
    alone = Bench()
    completion = alone.submit()
    alone.fail(alone.decodes[0], completion, code)
    assert alone.route(completion).decode is alone.decodes[0], "better than nobody"


def test_who_makes_way_at_a_standstill_is_given_up_only_when_its_time_is_over() -> None:
    bench = Bench(num_decode=2, request_timeout_s=50.0)
    completion = bench.submit()
    for _ in range(2 * MAX_RETURNS):
        bench.fail(bench.route(completion).decode, completion, ErrorCode.STANDSTILL)
    assert completion.state is State.PREFILLING
    bench.now_s += 51.0
    bench.dispatcher.tick()
    error = result_of(completion).error
    assert error is not None and error.code == "request_timeout"


def test_a_replay_that_has_nothing_left_to_do_finishes() -> None:
    bench = Bench(num_decode=2)
    completion = bench.submit(max_tokens=2)
    bench.token(bench.prefills[0], completion, 0, 1)
    decode = bench.route(completion).decode
    bench.token(decode, completion, 1, 2)  # the finish reason is missing
    bench.lose(decode)
    assert result_of(completion) == Result("bc", "length", None)
    bench.assert_idle()


def test_lost_messages_lead_to_a_replay() -> None:
    bench = Bench()
    gap, silent = bench.submit(), bench.submit()
    for completion in (gap, silent):
        bench.token(bench.prefills[0], completion, 0, 1)
        bench.token(bench.decodes[0], completion, 1, 2)
    bench.token(bench.decodes[0], gap, 3, 4)
    bench.now_s += NET.worker_timeout_s + 0.1
    bench.dispatcher.tick()
    assert (gap.attempt.number, silent.attempt.number) == (1, 0)
    bench.now_s += NET.step_timeout_s
    bench.dispatcher.tick()
    assert silent.attempt.number == 1


def test_a_prefill_worker_that_lost_blocks_matters_only_until_the_decode_worker_has_spoken() -> None:
    bench = Bench()
    before, after = bench.submit(), bench.submit()
    for completion in (before, after):
        bench.token(bench.route(completion).prefill, completion, 0, 1)
    bench.token(bench.decodes[0], after, 1, 2)
    for completion in (before, after):
        bench.fail(bench.route(completion).prefill, completion, ErrorCode.HANDOFF_LOST)
    assert (before.attempt.number, after.attempt.number) == (1, 0)


def test_a_bug_met_by_one_completion_ends_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_decode=2)
    completions = [bench.submit() for _ in range(6)]
    for completion in completions:
        bench.token(bench.prefills[0], completion, 0, 1)
    worker = bench.decodes[0]
    here = [completion for completion in completions if bench.route(completion).decode is worker]
    with monkeypatch.context() as patch:
        patch.setattr(choice_of(here[0]).text, "push", bug)
        ids = tuple(completion.spec.request_id for completion in here)
        zeros, ones, twos = (pack_ids([value] * 3) for value in range(3))
        bench.reports.on_tokens(b"", TokenBatch(worker.id, worker.epoch, ids, zeros, ones, twos, bytes(3)))
    error = result_of(here[0]).error
    assert error is not None
    assert (error.status, error.code) == (500, "internal_error")
    assert [completion.output.token_ids for completion in here[1:]] == [[1, 2], [1, 2]]
    monkeypatch.setattr(bench.metrics, "replays", SimpleNamespace(labels=Mock(side_effect=[RuntimeError, Mock()])))
    bench.lose(worker)
    assert [completion.state for completion in here] == [State.FAILED, State.FAILED, State.PREFILLING]


def bug(*_: object) -> None:
    raise RuntimeError("bug")


def test_an_invalid_token_is_a_failure_of_the_worker_not_of_the_router() -> None:
    bench = Bench()
    completion = bench.submit()
    bench.token(bench.prefills[0], completion, 0, VOCAB)
    bench.token(bench.prefills[0], completion, 0, -1)
    bench.token(bench.prefills[0], completion, 0, 1, finish=9)
    assert completion.failures.num_counted == 3
    assert completion.output.token_ids == []


@pytest.mark.medium
def test_any_history_ends_exactly_once() -> None:
    """Random tokens, losses, joins, failures, aborts and time: no assertion, no leftover, one end each."""
    for seed in range(150):
        _random_history(random.Random(seed))


def _random_history(rng: random.Random) -> None:
    bench = Bench(num_prefill=2, num_decode=2, request_timeout_s=50.0, worker_wait_s=5.0)
    completions = [bench.submit(max_tokens=rng.randint(1, 8)) for _ in range(4)]
    for epoch in range(2, 122):
        _random_event(rng, bench, rng.choice(completions), epoch)
    bench.now_s += 51.0
    bench.dispatcher.tick()
    for completion in completions:
        assert completion.state in TERMINAL_STATES
        if completion.state is not State.ABORTED:
            assert result_of(completion).text == decode_ids(range(len(completion.output.token_ids)))
    bench.assert_idle()


def _random_event(rng: random.Random, bench: Bench, completion: Completion, epoch: int) -> None:
    workers = list(bench.pool)
    kind = rng.random()
    if kind < 0.02:
        bench.dispatcher.abort(completion)
    elif kind < 0.04:
        bench.now_s += rng.random() * 4
        bench.dispatcher.tick()
    elif not workers:
        bench.join("d0", Role.DECODE, epoch)
    elif kind < 0.07:
        lost = rng.choice(workers)
        bench.lose(lost)
        if rng.random() < 0.8:
            bench.join(lost.id, lost.ready.role, epoch)
    elif kind < 0.12:
        code = rng.choice([ErrorCode.INTERNAL, ErrorCode.PREEMPTED, ErrorCode.HANDOFF_LOST])
        bench.fail(rng.choice(workers), completion, code)
    else:
        _random_token(rng, bench, completion, rng.choice(workers))


def _random_token(rng: random.Random, bench: Bench, completion: Completion, worker: Member) -> None:
    last = completion.spec.sampling.max_tokens - 1
    index = min(last, max(0, len(completion.output.token_ids) + rng.choice([-1, 0, 0, 0, 1])))
    attempt = max(0, completion.attempt.number - (rng.random() < 0.1))
    bench.token(worker, completion, index, index, LENGTH if index == last else 0, attempt)
