"""Simulated time: what happens next, in order; at one moment in the order in which it was asked for."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from common.base.errors import BatonError

MOST_EVENTS = 200_000_000
"""Of a simulation: beyond it something goes in circles."""


class Events:
    """A clock that jumps from one event to the next. An event that is no longer wanted is found out by who gets it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_ms: float, act: Callable[[], None]) -> None:
        """Do something then, or now if that is over."""
        heappush(self._heap, (max(time_ms, self.now_ms), next(self._numbers), act))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_ms, _, act = heappop(self._heap)
            act()
            self.num_done += 1
            if self.num_done > MOST_EVENTS:
                raise BatonError(f"the simulation has not ended after {MOST_EVENTS} events, at {self.now_ms:.0f} ms")
