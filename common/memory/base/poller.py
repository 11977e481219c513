"""How a process beside a GPU waits: awake for a while after it had something to do, and asleep after that.

A core that sleeps for milliseconds is slow when it wakes, as its caches and its clock have gone: a message that is read
in 15 us takes 200, and so does everything that follows. Beside a GPU that is a good part of a step. A moment ends early
if something arrives.
"""

import os
import select
import selectors
import time
from collections.abc import Iterable

AWAKE_S = 1.0
MOMENT_S = 50e-6
MAX_DESCRIPTORS = 1024
"""Of `select`, which alone can be told to wait for less than a millisecond: those from here on it cannot watch."""
MIN_CORES = 8
"""Two workers, their memory server and the router have a core each then, whoever is awake."""


def gpu_awake_s() -> float:
    """How long processes beside a GPU sleep for moments only; where cores are few they would take them from others."""
    return AWAKE_S if len(os.sched_getaffinity(0)) >= MIN_CORES else 0.0


def nap(descriptors: Iterable[int]) -> None:
    """Sleep for a moment, or until one of these may be read."""
    select.select([descriptor for descriptor in descriptors if descriptor < MAX_DESCRIPTORS], [], [], MOMENT_S)


class Vigil:
    """Selects; for `awake_s` after something has arrived it sleeps for moments only.

    Args:
        selector: that can be selected itself, as those of the system are.
    """

    def __init__(self, selector: selectors.DefaultSelector, awake_s: float) -> None:
        self.selector, self.awake_s = selector, awake_s
        self._until_s = 0.0

    def select(self, wait_s: float) -> list[selectors.SelectorKey]:
        """What there is to be read or written, after `wait_s` at most."""
        if is_awake := time.monotonic() < self._until_s:
            nap([self.selector.fileno()])
        events = self.selector.select(0.0 if is_awake else wait_s)
        if events:
            self._until_s = time.monotonic() + self.awake_s
        return [key for key, _ in events]
