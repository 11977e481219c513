"""When prompts and decode steps take turns, in model time: a GPU of which both get what they get side by side."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from common.base.percentiles import percentile
from common.serving.turns.allowance import BURST_MS, EARNED
from common.serving.turns.law import (
    LEAST_TOKENS,
    NUM_PAUSES,
    SIDE_BY_SIDE,
    TURN_TOKENS,
    Plan,
    TurnLaw,
    Waiting,
)
from common.settings.slo_section import SloSection

PAIR_MS, TOKEN_MS, STEP_MS = 9.6e-7, 0.0119, 1.2
PROMPT_SPEED, DECODE_SPEED = 0.6, 0.4  # side by side
HAND_OVER_MS = 0.25
NOBODY = 0.0
MANY = 5.2


class Costs:
    """About those of a 4B model on a large GPU."""

    def span_ms(self, begin: int, end: int) -> float:
        return TOKEN_MS * (end - begin) + PAIR_MS * (end**2 - begin**2) / 2

    def step_ms(self, chunks: Sequence[tuple[int, int]]) -> float:
        return STEP_MS + sum(self.span_ms(before, before + count) for count, before in chunks)


@dataclass
class Prompt:
    arrives_ms: float
    num_tokens: int
    num_done: int = 0
    first_ms: float = 0.0


@dataclass
class Gpu:
    """Runs prompts, first come, first served, beside 64 rows; steps take `slowness` times the forecast."""

    law: TurnLaw
    slowness: float = 1.0
    is_own: bool = True  # prompts and rows are of one client
    now_ms: float = 0.0
    num_turns: int = 0
    num_prompt_steps: int = 0
    num_decode_steps: int = 0  # amid turns
    gaps_ms: list[float] = field(default_factory=list)  # around turns

    def run(self, prompts: Iterable[Prompt]) -> list[float]:
        """Return the waits for first tokens."""
        future, waiting, done = deque(sorted(prompts, key=lambda each: each.arrives_ms)), list[Prompt](), list[Prompt]()
        while future or waiting:
            if not waiting:
                self.now_ms = max(self.now_ms, future[0].arrives_ms)
            while future and future[0].arrives_ms <= self.now_ms:
                waiting.append(future.popleft())
            plan = self._plan(waiting)
            self._run_step(waiting, plan)
            done += [each for each in waiting if each.num_done == each.num_tokens]
            waiting = [each for each in waiting if each.num_done < each.num_tokens]
        self._plan([])
        return [each.first_ms - each.arrives_ms for each in done]

    def _plan(self, waiting: list[Prompt]) -> Plan:
        prompts = [self._told(each) for each in waiting]
        return self.law.plan(prompts, MANY, now_ms=self.now_ms, is_own=self.is_own)

    def _told(self, prompt: Prompt) -> Waiting:
        return Waiting(self.now_ms - prompt.arrives_ms, 0, prompt.num_done, prompt.num_tokens)

    def _run_step(self, waiting: list[Prompt], plan: Plan) -> None:
        num_left, chunks = plan.num_tokens or 8192, []
        for prompt in waiting:
            count = min(num_left, prompt.num_tokens - prompt.num_done)
            chunks.append((count, prompt.num_done))
            prompt.num_done, num_left = prompt.num_done + count, num_left - count
        self.num_prompt_steps += 1
        step_ms = self.slowness * self.law.forecast.step_ms(chunks)
        self.now_ms += step_ms + HAND_OVER_MS if plan.is_turn else step_ms / PROMPT_SPEED
        for prompt in waiting:
            if prompt.num_done == prompt.num_tokens and not prompt.first_ms:
                prompt.first_ms = self.now_ms
        if plan.is_turn:
            self.now_ms += MANY + HAND_OVER_MS
            self.gaps_ms.append(step_ms + MANY + 2 * HAND_OVER_MS)
            self.law.paused(plan, self.gaps_ms[-1])
            self.num_turns, self.num_decode_steps = self.num_turns + 1, self.num_decode_steps + 1


def law(itl_ms: float = 100.0, ttft_ms: float = 100.0) -> TurnLaw:
    return TurnLaw(SloSection(itl_ms, ttft_ms), Costs())


def poisson(rate: float, num: int, num_tokens: int) -> list[Prompt]:
    rng, now_ms, prompts = random.Random(5), 0.0, list[Prompt]()
    for _ in range(num):
        now_ms += rng.expovariate(rate / 1e3)
        prompts.append(Prompt(now_ms, num_tokens))
    return prompts


def at_once(num: int, num_tokens: int) -> list[Prompt]:
    return [Prompt(0.0, num_tokens) for _ in range(num)]


def test_prompts_in_time_stop_no_stream() -> None:
    gpu = Gpu(law())
    assert max(gpu.run(poisson(16.0, 200, 1024))) < 200.0
    assert (gpu.num_turns, gpu.law.num_changes) == (0, 0)


def test_late_prompts_take_turns_which_end_with_them_and_keep_the_target_of_pauses() -> None:
    side_by_side, turns = Gpu(law(itl_ms=0.0)), Gpu(law())
    slow, fast = side_by_side.run(at_once(64, 1024)), turns.run(at_once(64, 1024))
    assert side_by_side.num_turns == 0, "without a target of pauses streams are never stopped"
    assert max(fast) < 0.85 * max(slow)
    assert max(turns.gaps_ms) <= 100.0 < max(turns.gaps_ms) + 50.0, "as long as they may be"
    assert (turns.law.is_pressed, turns.law.num_changes) == (False, 2)


def test_a_target_of_no_wait_means_always_in_turns() -> None:
    gpu = Gpu(law(ttft_ms=0.0))
    assert len(gpu.run(poisson(8.0, 50, 2048))) == 50
    assert gpu.num_turns == gpu.num_prompt_steps > 0
    assert law(ttft_ms=0.0).plan([Waiting(0.0, 0, 0, 4096)], NOBODY) == SIDE_BY_SIDE, "nobody decodes"


@pytest.mark.parametrize(("target_ms", "most_tokens"), [(30.0, 1536), (60.0, 4096), (100.0, 6144), (250.0, 8192)])
def test_the_target_of_pauses_sizes_turns(target_ms: float, most_tokens: int) -> None:
    late = [Waiting(500.0, 0, 0, 1024)] * 20
    plan = law(target_ms).plan(late, MANY)
    assert (plan.is_turn, plan.num_tokens) == (True, most_tokens)
    gpu = Gpu(law(target_ms))
    gpu.run(at_once(64, 1024))
    assert max(gpu.gaps_ms) <= target_ms


def test_context_makes_turns_short_and_no_target_makes_them_too_short() -> None:
    behind, fresh = [Waiting(5000.0, 0, 24_576, 32_768)], [Waiting(5000.0, 0, 0, 32_768)]
    assert law().plan(behind, MANY).num_tokens < law().plan(fresh, MANY).num_tokens
    assert law(10.0).plan(behind, MANY).num_tokens == TURN_TOKENS[-1]


def test_a_long_prompt_is_late_only_beyond_twice_its_own_time() -> None:
    assert law().plan([Waiting(0.0, 0, 0, 30_000)], MANY) == SIDE_BY_SIDE
    own_ms = Costs().span_ms(0, 30_000)
    assert law().plan([Waiting(0.75 * own_ms, 0, 0, 30_000)], MANY).is_turn
    cached = Waiting(0.75 * own_ms, 29_000, 29_000, 30_000)
    assert law().plan([cached], MANY).is_turn, "its own time is that of what is computed"


def test_what_runs_ahead_counts() -> None:
    assert law().plan([Waiting(0.0, 0, 0, 1024)], MANY) == SIDE_BY_SIDE
    assert law().plan([Waiting(0.0, 0, 0, 1024)], MANY, running_ms=100.0).is_turn


def test_tiny_prompts_never_stop_streams() -> None:
    late = law()
    assert late.plan([Waiting(900.0, 0, 0, LEAST_TOKENS - 1)], MANY) == SIDE_BY_SIDE
    assert late.plan([Waiting(900.0, 0, 0, 128)] * 4, MANY).is_turn, "several together are worth it"
    gpu = Gpu(law())
    gpu.run(poisson(60.0, 300, 64))
    assert gpu.num_turns == 0


def test_between_the_two_thresholds_nothing_changes() -> None:
    once, own_ms = law(), Costs().span_ms(0, 1024)

    def is_turn(late_ms: float) -> bool:
        return once.plan([Waiting(late_ms - own_ms / once.shared_speed + 2 * own_ms, 0, 0, 1024)], MANY).is_turn

    seen = [is_turn(late_ms) for late_ms in (51.0, 99.0, 101.0, 99.0, 51.0, 99.0, 49.0, 99.0, 51.0)]
    assert seen == [False, False, True, True, True, True, False, False, False]
    assert once.num_changes == 2


def test_at_the_edge_of_what_a_gpu_computes_modes_change_seldom() -> None:
    gpu = Gpu(law())
    waits = gpu.run(poisson(46.0, 1500, 1024))  # beyond what it computes side by side
    assert gpu.num_turns > 0
    assert gpu.law.num_changes <= 3 * gpu.now_ms / 1e3, "at most three times a second, for free"
    assert percentile(waits, 99) < 400.0


def test_neither_side_starves_under_more_prompts_than_a_gpu_computes() -> None:
    gpu = Gpu(law())
    waits = gpu.run(poisson(120.0, 1200, 1024))
    assert len(waits) == 1200
    assert gpu.num_decode_steps == gpu.num_turns > 100, "a decode step after each turn"
    assert gpu.now_ms / gpu.num_turns < 110.0


def test_streams_wait_for_prompts_of_another_client_for_a_burst_and_no_longer() -> None:
    beside, own = Gpu(law(), is_own=False), Gpu(law())
    waits = beside.run(poisson(120.0, 1200, 1024))
    assert len(waits) == 1200, "the other client's prompts go on side by side"
    assert BURST_MS <= sum(beside.gaps_ms) < BURST_MS + max(beside.gaps_ms), "though prompts are late for many seconds"
    assert beside.now_ms > 15 * BURST_MS
    own.run(poisson(120.0, 1200, 1024))
    assert sum(own.gaps_ms) > 0.9 * own.now_ms, "a client that is alone delays itself"
    assert not beside.law.in_turns and not beside.law.is_pressed


def test_time_without_late_prompts_earns_the_next_burst() -> None:
    gpu = Gpu(law(), is_own=False)
    gpu.run(poisson(120.0, 1200, 1024))
    spent_ms = sum(gpu.gaps_ms)
    gpu.now_ms += 0.5 * BURST_MS / EARNED
    gpu.run(Prompt(gpu.now_ms, 1024) for _ in range(200))
    assert sum(gpu.gaps_ms) - spent_ms == pytest.approx(0.5 * BURST_MS, abs=max(gpu.gaps_ms))
    gpu.now_ms += 100 * BURST_MS / EARNED
    gpu.run(Prompt(gpu.now_ms, 1024) for _ in range(200))
    assert sum(gpu.gaps_ms) - spent_ms == pytest.approx(1.5 * BURST_MS, abs=2 * max(gpu.gaps_ms)), "one is saved up"


@pytest.mark.medium
@pytest.mark.parametrize("slowness", [1.3, 1.6])
def test_pauses_correct_a_wrong_forecast(slowness: float) -> None:
    gpu = Gpu(law(), slowness)
    gpu.run(at_once(200, 8192))
    assert max(gpu.gaps_ms) > 100.0, "at first"
    assert max(gpu.gaps_ms[NUM_PAUSES:]) <= 100.0, "and only at first"
    gpu.slowness = 1.0
    gpu.run(at_once(200, 8192))
    assert max(gpu.gaps_ms[-NUM_PAUSES:]) > 80.0 and gpu.law.slowness == 1.0, "turns are as long as before"


def test_a_claim_ends_by_itself_soon_after_its_forecast() -> None:
    claims_ms = [Plan(True, 1024, pause_ms).claim_ms(SloSection(itl_ms=50.0)) for pause_ms in (40.0, 90.0, 312.0)]
    assert claims_ms == [pytest.approx(48.0), 100.0, 312.0], "at most twice the target, or what is known to be longer"
