"""Simulated time: events in order of time, and at equal times in order of request."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Events:
    """A clock that jumps from event to event. Receivers ignore events no longer wanted."""

    def __init__(self) -> None:
        self.now_ms = 0.0
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
