"""Simulated time: events in order of time, and at equal times in order of request."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from common.base.errors import BatonError

MOST_EVENTS = 200_000_000
"""Limit of a simulation; beyond, the simulation goes in circles."""


class Events:
    """A clock that jumps from event to event. Receivers ignore events no longer wanted."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_ms: float, act: Callable[[], None]) -> None:
        """Schedule an action at a time, or now if the time has passed."""
        heappush(self._heap, (max(time_ms, self.now_ms), next(self._numbers), act))

    def run(self) -> None:
        """Run until no event is left."""
        while self._heap:
            self.now_ms, _, act = heappop(self._heap)
            act()
            self.num_done += 1
            if self.num_done > MOST_EVENTS:
                raise BatonError(f"the simulation has not ended after {MOST_EVENTS} events, at {self.now_ms:.0f} ms")
