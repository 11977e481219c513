"""What the order of prompts promises, over both queues, router's and worker's, in model time."""

from random import Random

import pytest

from tests.scheduling.simulation import FULL_STEP_S, STEP_S, TOKEN_S, Asked, Outcome, Simulation, percentile, poisson
from tests.support.marks import first_then

LONG_RATE = 1 / (STEP_S + 8192 * TOKEN_S)
"""Prompts of 8,192 tokens a second that a worker computes if it does nothing else."""


def by_arrival(*loads: list[Asked]) -> list[Asked]:
    return sorted((asked for load in loads for asked in load), key=lambda asked: asked.arrival_s)


def ttfts(outcomes: list[Outcome], num_tokens: int | None = None, client: str | None = None) -> list[float]:
    """Seconds to the first token of prompts of one length or client."""
    return [
        outcome.ttft_s
        for outcome in outcomes
        if num_tokens in (None, outcome.asked.num_tokens) and client in (None, outcome.asked.client)
    ]


def mixed(shorts_a_second: float, duration_s: float = 50.0) -> list[Asked]:
    """Prompts of 8,192 tokens at 70 % of a worker's rate, and short ones."""
    longs = poisson(0.7 * LONG_RATE, 8192, duration_s, seed=1)
    return by_arrival(list(longs), list(poisson(shorts_a_second, 128, duration_s, seed=2)))


@pytest.mark.medium
@pytest.mark.parametrize("shorts_a_second", first_then(pytest.mark.slow, [2, 20, 80]))
def test_short_prompts_beside_long_ones_wait_three_steps_at_most(shorts_a_second: float) -> None:
    load = mixed(shorts_a_second)
    first_come, ours = Simulation(first_come=True), Simulation()
    assert percentile(ttfts(first_come.run(load), 128), 99) > 6 * FULL_STEP_S, "the load shows nothing"
    assert percentile(ttfts(ours.run(load), 128), 99) <= 3 * FULL_STEP_S
    assert ours.busy_s <= 1.02 * first_come.busy_s


def test_a_short_prompt_behind_a_hundred_and_fifty_long_ones_is_next() -> None:
    outcomes = Simulation().run([*(Asked(0.0, 1900) for _ in range(150)), Asked(0.3, 128)])
    assert outcomes[-1].ttft_s <= 3 * FULL_STEP_S


@pytest.mark.medium
@pytest.mark.parametrize(
    "load",
    first_then(
        pytest.mark.slow,
        [
            by_arrival([Asked(0.0, 1900)] * 150, list(poisson(100, 128, 8.0, seed=3))),
            by_arrival([Asked(0.0, 8192)] * 20, list(poisson(600, 128, 3.0, seed=4))),
            by_arrival([Asked(0.0, 128_000)] * 2, list(poisson(50, 128, 6.0, 5)), list(poisson(0.5, 30_000, 6.0, 6))),
            [Asked(0.0, Random(number).choice([100, 300, 1000, 4000, 16_000, 60_000])) for number in range(200)],
        ],
    ),
    ids=["short beside many", "flooded by short", "two very long", "all lengths at once"],
)
@pytest.mark.parametrize("num_blocks", [60_000, 8_200], ids=["roomy", "tight"])
def test_no_prompt_waits_longer_than_one_and_a_half_times_its_turn(load: list[Asked], num_blocks: int) -> None:
    first_come, ours = Simulation(num_blocks=num_blocks, first_come=True), Simulation(num_blocks=num_blocks)
    for mine, turn in zip(ours.run(load), first_come.run(load), strict=True):
        assert mine.ttft_s <= 1.5 * turn.ttft_s + 2 * FULL_STEP_S, "two steps are in flight whatever comes"
    assert ours.busy_s <= 1.02 * first_come.busy_s
    assert ours.now_s <= 1.02 * first_come.now_s


@pytest.mark.medium
def test_short_prompts_pass_wherever_they_can_be_computed() -> None:
    longs = list(poisson(2 * 0.7 * LONG_RATE, 8192, 40.0, seed=1))
    outcomes = Simulation(num_workers=2).run(by_arrival(longs, list(poisson(100, 128, 40.0, seed=2))))
    assert percentile(ttfts(outcomes, 128), 99) <= 3 * FULL_STEP_S


def test_a_client_is_served_in_its_turn_while_another_floods() -> None:
    flood = [Asked(0.0, 1900, "a") for _ in range(300)]
    few = list(poisson(2, 4000, 8.0, seed=3, client="b"))
    outcomes = Simulation().run(by_arrival(flood, few))
    assert max(ttfts(outcomes, client="b")) <= 9 * FULL_STEP_S
    assert max(ttfts(Simulation(first_come=True).run(by_arrival(flood, few)), client="b")) > 60 * FULL_STEP_S


@pytest.mark.medium
def test_a_flood_of_short_prompts_takes_no_more_than_its_share_from_another_client() -> None:
    """Both want 40 steps: each gets half of all, so the first to end has waited 80, and half as long again at most."""
    flood = [Asked(0.0, 128, "a") for _ in range(64 * 60)]
    longs = [Asked(0.0, 8192, "b") for _ in range(40)]
    outcomes = Simulation().run([*flood, *longs])
    assert max(ttfts(outcomes, client="b")) <= 1.1 * 80 * FULL_STEP_S


def test_a_prompt_of_a_lower_priority_number_goes_before_everything_that_waits() -> None:
    load = [*(Asked(0.0, 8192) for _ in range(20)), Asked(0.3, 8000, priority=-1), Asked(0.3, 128, priority=1)]
    outcomes = Simulation().run(load)
    assert outcomes[-2].ttft_s <= 4 * FULL_STEP_S
    assert outcomes[-1].ttft_s >= max(outcome.ttft_s for outcome in outcomes[:-2]) - 0.3
