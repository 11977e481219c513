"""When to launch the next step: so late that handoffs which arrive meanwhile still join it, and never too late.

A step launched as soon as the one before it runs leaves the device no gap, but closes its batch a
whole step early. A step takes nearly as long as the last ones of its size did, so the launch can wait
until shortly before the running step ends: by as much as launches lately took, and a little more.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable

MEMORY = 8
"""Steps of a size that are remembered; the shortest counts, so that a slow one delays nothing."""

LAUNCHES = 64
"""Launches that are remembered, each with how long it took from when it was due and the host was free for it."""

NUM_LATE = 1
"""So many of them may have come too late: a rare delay, which idles the device once, is not waited for always."""

SLACK_S = 0.15e-3
"""Between the launch and the expected end of the running step; the end is seen that much late."""

FIRST_MARGIN_S = 0.7e-3
"""Kept while too few launches are known."""


class Pace:
    """Knows how long steps and launches take; is told when steps are launched and seen to have ended."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))
        self._delays_s: deque[float] = deque(maxlen=LAUNCHES)
        self._margin_s = FIRST_MARGIN_S  # before the expected end of the running step
        self._asked_s: float | None = None  # when `should_wait` was first asked since the last launch
        self._due_s = 0.0  # when the next launch had better begin
        self._sizes: deque[int] = deque()  # of the steps in flight, oldest first
        self._begin_s = 0.0  # of the oldest step in flight

    def launched(self, size: int) -> None:
        """A step of `size` rows was launched behind those in flight."""
        now_s = self._clock()
        if self._asked_s is not None and now_s >= self._due_s:
            self._learn(now_s - max(self._due_s, self._asked_s))
        self._asked_s = None
        if not self._sizes:
            self._begin_s = now_s
        self._sizes.append(size)

    def ended(self) -> None:
        """The oldest step in flight is over; the next one began when it ended."""
        now_s = self._clock()
        self._durations_s[self._sizes.popleft()].append(now_s - self._begin_s)
        self._begin_s = now_s

    def should_wait(self) -> bool:
        """Whether the running step has so long to go that the next launch can wait."""
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

    def _learn(self, delay_s: float) -> None:
        """A launch took that long."""
        self._delays_s.append(delay_s)
        if len(self._delays_s) == LAUNCHES:
            self._margin_s = sorted(self._delays_s)[-1 - NUM_LATE] + SLACK_S
