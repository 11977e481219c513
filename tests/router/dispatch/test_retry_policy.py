"""A request that kills every worker that computes it is given up, and costs no other request more than time."""

import pytest

from common.wire.messages.worker import Role
from router.dispatch.completion.state import Completion, State
from router.placement.member import Member
from tests.router.bench import LENGTH, NET, Bench, Result, decode_ids, result_of

NUM_TOKENS = 20


def is_prompt(completion: Completion) -> bool:
    return len(completion.output.token_ids) == completion.attempt.first_index


def computes(worker: Member, completion: Completion) -> bool:
    """Whether it is that worker's turn."""
    route = completion.attempt.route
    return route is not None and worker is (route.prefill if is_prompt(completion) else route.decode)


class Stage:
    """Workers that compute what they have in steps, and die of a poisonous completion, as a prompt or later."""

    def __init__(self, bench: Bench, poison: set[Completion], *, as_prompt: bool) -> None:
        self.bench, self.poison, self.as_prompt = bench, poison, as_prompt
        self.num_deaths = 0

    def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            for worker in list(self.bench.pool):
                self._step(worker)

    def _step(self, worker: Member) -> None:
        completions = list(self.bench.dispatcher.lifecycle.active.values())
        batch = [completion for completion in completions if computes(worker, completion)]
        if any(completion in self.poison and is_prompt(completion) is self.as_prompt for completion in batch):
            self.num_deaths += 1
            self.bench.lose(worker)
            self.bench.join(worker.id, worker.ready.role, worker.epoch + 1)
            return
        for completion in batch:
            index = len(completion.output.token_ids)
            self.bench.token(worker, completion, index, index, LENGTH if index == NUM_TOKENS - 1 else 0)


@pytest.mark.parametrize("as_prompt", [True, False])
@pytest.mark.parametrize("num_workers", [(1, 1), (2, 3), (0, 1)])
@pytest.mark.parametrize("max_attempts", [2, 4])
def test_only_who_kills_workers_is_given_up(as_prompt: bool, num_workers: tuple[int, int], max_attempts: int) -> None:
    bench = Bench(*num_workers, max_attempts=max_attempts)
    completions = [bench.submit(max_tokens=NUM_TOKENS) for _ in range(12)]
    poison = {completions[5], completions[9]}
    stage = Stage(bench, poison, as_prompt=as_prompt)
    stage.run(num_turns=300)
    for completion in completions:
        if completion in poison:
            error = result_of(completion).error
            assert error is not None
            assert (error.status, error.code) == (500, "internal_error")
        else:
            assert result_of(completion) == Result(decode_ids(range(NUM_TOKENS)), "length", None)
    assert stage.num_deaths <= 2 + len(poison) * max_attempts
    bench.assert_idle()
    assert not any(worker.work.num_unproven or worker.work.has_trial for worker in bench.pool)


def test_what_got_on_between_two_deaths_is_no_suspect() -> None:
    bench = Bench()
    completion = bench.submit(max_tokens=500)
    for epoch in range(2, 12):
        for _ in range(8):
            index = len(completion.output.token_ids)
            worker = bench.decodes[0] if index > completion.attempt.first_index else bench.prefills[0]
            bench.token(worker, completion, index, index)
        bench.lose(bench.decodes[0])
        bench.decodes[0] = bench.join("d0", Role.DECODE, epoch)
        assert completion.failures.num_counted == 1
    assert completion.state is State.PREFILLING


def test_many_workers_that_die_at_once_count_once() -> None:
    bench = Bench(num_prefill=2, num_decode=4)
    completions = [bench.submit() for _ in range(8)]
    for completion in completions:
        bench.token(bench.route(completion).prefill, completion, 0, 1)
    bench.now_s += NET.worker_timeout_s + 0.1
    for loss in bench.pool.losses(bench.now_s):
        bench.lose(loss.worker)
    assert [(c.state, c.failures.num_counted) for c in completions] == [(State.QUEUED, 1)] * 8
