"""The next launch waits as long as the running step surely lasts, and never without knowing."""

from decode_worker.pace import MARGIN_S, MEMORY, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run_steps(pace: Pace, clock: Clock, size: int, durations_s: list[float]) -> None:
    """One after another, each launched while the one before runs."""
    pace.launched(size)
    for duration_s in durations_s:
        pace.launched(size)
        clock.now_s += duration_s
        pace.ended()


def test_waits_until_shortly_before_the_expected_end() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    run_steps(pace, clock, 8, [0.004, 0.005])
    assert pace.should_wait()
    clock.now_s += 0.004 - MARGIN_S - 1e-6  # the shortest counts
    assert pace.should_wait()
    clock.now_s += 2e-6
    assert not pace.should_wait()


def test_never_waits_without_knowing_the_size() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    assert not pace.should_wait()
    pace.launched(1)
    assert not pace.should_wait()
    clock.now_s += 0.004
    pace.ended()
    pace.launched(2)
    assert not pace.should_wait()


def test_a_step_after_a_pause_begins_when_it_is_launched() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    pace.launched(1)
    clock.now_s += 0.004
    pace.ended()
    clock.now_s += 10.0
    pace.launched(1)
    assert pace.should_wait()
    clock.now_s += 0.004
    pace.ended()
    pace.launched(1)
    clock.now_s += 0.004 - MARGIN_S + 1e-6
    assert not pace.should_wait()  # the pause was not taken for a long step


def test_forgets_what_steps_once_took() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    run_steps(pace, clock, 4, [0.001] + [0.004] * MEMORY)
    clock.now_s += 0.002
    assert pace.should_wait()
