"""How long computing takes, as steps show it."""

import pytest

from common.serving.prompt_rate import UNKNOWN_US, PromptRate

BLOCK = 16


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_is_long_until_a_step_has_shown_it(clock: Clock) -> None:
    rate = PromptRate(clock=clock)
    assert rate.block_us(BLOCK) == UNKNOWN_US * BLOCK
    rate.launched(16)
    clock.now_s += 1.0
    rate.ended()
    assert rate.block_us(BLOCK) == UNKNOWN_US * BLOCK, "a short step tells nothing"
    rate.launched(1000)
    clock.now_s += 0.1
    rate.ended()
    assert rate.block_us(BLOCK) == 100 * BLOCK


def test_steps_that_wait_for_others_take_from_their_end(clock: Clock) -> None:
    rate = PromptRate(clock=clock)
    for _ in range(2):
        rate.launched(1000)
    for _ in range(2):
        clock.now_s += 0.1
        rate.ended()
    assert rate.block_us(BLOCK) == 100 * BLOCK
    clock.now_s += 50.0
    rate.launched(1000)
    clock.now_s += 0.2
    rate.ended()
    assert rate.block_us(BLOCK) == 120 * BLOCK, "nobody computes while nothing is there, and one step is not all"
