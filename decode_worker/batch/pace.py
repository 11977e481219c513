"""Pace of launches: late enough for arriving handoffs to join the next step, early enough to leave no gap.

A step launched as soon as the last step runs leaves the device no gap, but closes its batch a whole step early. A step
takes about as long as the last steps of equal size. So the launch can wait until shortly before the running step ends,
by the time of recent launches and a little more.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable

MEMORY = 8
"""Steps remembered for each size; the shortest counts, so a slow step delays nothing."""

LAUNCHES = 64
"""Launches remembered, each with its time from due, or host free, to done."""

GROWTH = 1.005
"""Factor by which the shortest known time grows with each step, because contexts grow."""

NUM_LATE = 1
"""Remembered launches allowed to be late, because a rare delay costs only a gap."""

SLACK_S = 0.15e-3
"""Seconds between a launch and the expected end, because the end is seen late."""

FIRST_MARGIN_S = 0.7e-3
"""Seconds kept while too few launches are known."""


class Pace:
    """Durations of steps and launches, learned from reported launches and ends of steps."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))
        self._alone_s: dict[int, float] = {}  # shortest time of a step of each size, of late
        self._delays_s: deque[float] = deque(maxlen=LAUNCHES)
        self._margin_s = FIRST_MARGIN_S  # launch so long before the expected end
        self._asked_s: float | None = None  # first `should_wait` since the last launch
        self._due_s = 0.0  # best time of the next launch
        self._sizes: deque[int] = deque()  # of the steps in flight, oldest first
        self._begin_s = 0.0  # of the oldest step in flight

    def launched(self, size: int) -> None:
        """Record a step of `size` rows, launched behind the steps in flight."""
        now_s = self._clock()
        if self._asked_s is not None and now_s >= self._due_s:
            self._learn(now_s - max(self._due_s, self._asked_s))
        self._asked_s = None
        if not self._sizes:
            self._begin_s = now_s
        self._sizes.append(size)

    def ended(self) -> None:
        """Record the end of the oldest step in flight; the next step began at that moment."""
        now_s, size = self._clock(), self._sizes.popleft()
        took_s = now_s - self._begin_s
        self._durations_s[size].append(took_s)
        self._alone_s[size] = min(took_s, self._alone_s.get(size, took_s) * GROWTH)
        self._begin_s = now_s

    def should_wait(self) -> bool:
        """Tell whether the running step lasts long enough for the next launch to wait."""
        if not self._sizes:
            return False
        known_s = self._durations_s.get(self._sizes[0])
        if known_s is None:
            return False
        now_s = self._clock()
        if self._asked_s is None:
            self._asked_s = now_s
        self._due_s = self._begin_s + min(known_s) - self._margin_s
        return now_s < self._due_s

    def held_up(self) -> None:
        """Record that the next launch waits for something else, so its delay teaches nothing."""
        self._asked_s = None

    def step_s(self, size: int) -> float:
        """Return the time of a step of `size` rows while nothing else runs on the device; 0 if unknown."""
        return self._alone_s.get(size, 0.0)

    def _learn(self, delay_s: float) -> None:
        """Record a launch's time, and update the margin."""
        self._delays_s.append(delay_s)
        if len(self._delays_s) == LAUNCHES:
            self._margin_s = sorted(self._delays_s)[-1 - NUM_LATE] + SLACK_S
