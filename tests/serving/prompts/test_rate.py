"""How long computing takes, as steps show it."""

import pytest

from common.serving.prompts.rate import LEAST_US, PromptRate

BLOCK = 16


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.rate = PromptRate(clock=lambda: self.now_s)

    def step(self, num_tokens: int, ms: float, count: int = 1) -> None:
        """So many that take so long, one after the other."""
        for _ in range(count):
            self.rate.launched(num_tokens)
            self.now_s += ms * 1e-3
            self.rate.ended()

    @property
    def token_us(self) -> float:
        assert self.rate.block_us(BLOCK) == round(self.rate.token_us * BLOCK)
        return self.rate.token_us


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_until_steps_have_shown_it_computing_takes_little(rig: Rig) -> None:
    assert rig.token_us == LEAST_US
    rig.step(16, 7.0, count=20)
    assert rig.token_us == LEAST_US, "steps of one size do not tell what part of them is for the tokens"
    rig.step(1000, 100.0)
    assert rig.token_us == pytest.approx(100)


def test_short_steps_of_several_sizes_tell_it_by_what_the_larger_take_more(rig: Rig) -> None:
    for _ in range(10):
        rig.step(20, 2.0 + 20 * 0.4)
        rig.step(300, 2.0 + 300 * 0.4)
        rig.step(100, 2.0 + 100 * 0.4)
    assert rig.token_us == pytest.approx(400, rel=0.01)


def test_where_short_steps_take_as_long_whatever_they_compute_that_is_little(rig: Rig) -> None:
    for _ in range(10):
        rig.step(20, 7.3)
        rig.step(400, 7.1)
    assert rig.token_us == LEAST_US


def test_a_slow_first_step_is_forgotten(rig: Rig) -> None:
    rig.step(300, 2000.0)
    for _ in range(40):
        rig.step(20, 5.0)
        rig.step(300, 7.0)
    assert rig.token_us < 10


def test_long_steps_count_for_more_than_short_ones(rig: Rig) -> None:
    rig.step(1000, 10.0)
    rig.step(20, 5.0, count=5)
    rig.step(300, 500.0, count=5)
    assert rig.token_us == pytest.approx(10)


def test_steps_that_wait_for_others_take_from_their_end(rig: Rig) -> None:
    for _ in range(2):
        rig.rate.launched(1000)
    for _ in range(2):
        rig.now_s += 0.1
        rig.rate.ended()
    assert rig.rate.block_us(BLOCK) == 100 * BLOCK
    rig.now_s += 50.0
    rig.step(1000, 200.0)
    assert rig.rate.block_us(BLOCK) == 120 * BLOCK, "nobody computes while nothing is there, and one step is not all"
