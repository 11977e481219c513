"""How a process beside a GPU waits: awake for a while after it had something to do, and asleep after that.

A core that sleeps for milliseconds is slow when it wakes, as its caches and its clock have gone: a message that is read
in 15 us takes 200, and so does everything that follows. Beside a GPU that is a good part of a step.
"""

import os
import selectors
import time

AWAKE_S = 1.0
MOMENT_S = 50e-6
MIN_CORES = 8
"""Two workers, their memory server and the router have a core each then, whoever is awake."""


def gpu_awake_s() -> float:
    """How long processes beside a GPU sleep for moments only; where cores are few they would take them from others."""
    return AWAKE_S if len(os.sched_getaffinity(0)) >= MIN_CORES else 0.0


class Vigil:
    """Selects; for `awake_s` after something has arrived it sleeps for moments only."""

    def __init__(self, selector: selectors.BaseSelector, awake_s: float) -> None:
        self.selector, self.awake_s = selector, awake_s
        self._until_s = 0.0

    def select(self, wait_s: float) -> list[selectors.SelectorKey]:
        """What there is to be read or written, after `wait_s` at most."""
        if is_awake := time.monotonic() < self._until_s:
            time.sleep(MOMENT_S)
        events = self.selector.select(0.0 if is_awake else wait_s)
        if events:
            self._until_s = time.monotonic() + self.awake_s
        return [key for key, _ in events]
