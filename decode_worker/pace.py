"""When to launch the next step: so late that handoffs which arrive meanwhile still join it, and never too late.

A step launched as soon as the one before it runs leaves the device no gap, but closes its batch a
whole step early. A step takes nearly as long as the last ones of its size did, so the launch can wait
until shortly before the running step ends.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable

MARGIN_S = 0.7e-3
"""Before the expected end of the running step; launching takes the host 0.1 to 0.5 ms."""

MEMORY = 8
"""Steps of a size that are remembered; the shortest counts, so that a slow one delays nothing."""


class Pace:
    """Knows how long steps take; is told when they are launched and seen to have ended."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))
        self._sizes: deque[int] = deque()  # of the steps in flight, oldest first
        self._begin_s = 0.0  # of the oldest step in flight

    def launched(self, size: int) -> None:
        """A step of `size` rows was launched behind those in flight."""
        if not self._sizes:
            self._begin_s = self._clock()
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
        return known_s is not None and self._clock() < self._begin_s + min(known_s) - MARGIN_S
