"""The next launch waits as long as the running step surely lasts, and never without knowing."""

from decode_worker.batch.pace import FIRST_MARGIN_S, LAUNCHES, MEMORY, NUM_LATE, SLACK_S, Pace


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
    clock.now_s += 0.004 - FIRST_MARGIN_S - 1e-6  # the shortest counts
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
    clock.now_s += 0.004 - FIRST_MARGIN_S + 1e-6
    assert not pace.should_wait()  # the pause was not taken for a long step


def test_forgets_what_steps_once_took() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    run_steps(pace, clock, 4, [0.001] + [0.004] * MEMORY)
    clock.now_s += 0.002
    assert pace.should_wait()


def launch_when_due(pace: Pace, clock: Clock, size: int, takes_s: float) -> float:
    """Wait for the next launch, which takes so long, and for the running step's end; returns what was left of it."""
    end_s = clock.now_s + 0.004
    while pace.should_wait():
        clock.now_s += 1e-6
    clock.now_s += takes_s
    pace.launched(size)
    left_s = end_s - clock.now_s
    clock.now_s = max(clock.now_s, end_s)
    pace.ended()
    return left_s


def test_launches_as_late_as_most_launches_allow() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    run_steps(pace, clock, 8, [0.004] * MEMORY)
    for i in range(LAUNCHES):
        launch_when_due(pace, clock, 8, 0.0009 if i < NUM_LATE else 0.0002)
    assert abs(launch_when_due(pace, clock, 8, 0.0002) - SLACK_S) < 1e-5
    for _ in range(NUM_LATE + 1):
        launch_when_due(pace, clock, 8, 0.0009)
    assert abs(launch_when_due(pace, clock, 8, 0.0009) - SLACK_S) < 1e-5


def test_a_launch_that_nobody_waited_for_is_no_longer_than_it_took() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    run_steps(pace, clock, 8, [0.004] * MEMORY)
    for _ in range(2 * LAUNCHES):  # the loop is busy with something else until shortly before the end of each step
        end_s = clock.now_s + 0.004
        clock.now_s += 0.0038
        assert not pace.should_wait()
        clock.now_s += 0.0001
        pace.launched(8)
        clock.now_s = end_s
        pace.ended()
    assert abs(launch_when_due(pace, clock, 8, 0.0001) - SLACK_S) < 1e-5
