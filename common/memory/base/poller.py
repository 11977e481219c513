"""Waiting of a process beside a GPU: awake for a while after an event, and asleep after that.

A core wakes slowly from milliseconds of sleep, because caches and clock have gone. Reading a message then takes 200 us
instead of 15 us, and all further work is slow too. Beside a GPU such a delay is a good part of a step. A nap ends early
on input.
"""

import os
import select
import selectors
import time
from collections.abc import Iterable

AWAKE_S = 1.0
MOMENT_S = 50e-6
MAX_DESCRIPTORS = 1024
"""Limit of `select`, the only call with timeouts below a millisecond; higher descriptors are not watched."""
MIN_CORES = 8
"""With so many cores, two workers, their memory server and the router have a core each."""


def gpu_awake_s() -> float:
    """Return how long a process beside a GPU stays awake: 0 with few cores, because polling takes them from others."""
    return AWAKE_S if len(os.sched_getaffinity(0)) >= MIN_CORES else 0.0


def nap(descriptors: Iterable[int]) -> None:
    """Sleep for `MOMENT_S`, or until a descriptor is readable."""
    select.select([descriptor for descriptor in descriptors if descriptor < MAX_DESCRIPTORS], [], [], MOMENT_S)


class AwakeSelector:
    """A selector that takes only short naps for `awake_s` after an event.

    Args:
        selector: must be selectable itself, as the system's selectors are.
    """

    def __init__(self, selector: selectors.DefaultSelector, awake_s: float) -> None:
        self.selector, self.awake_s = selector, awake_s
        self._until_s = 0.0

    def select(self, wait_s: float) -> list[selectors.SelectorKey]:
        """Return ready keys, after at most `wait_s`."""
        if is_awake := time.monotonic() < self._until_s:
            nap([self.selector.fileno()])
        events = self.selector.select(0.0 if is_awake else wait_s)
        if events:
            self._until_s = time.monotonic() + self.awake_s
        return [key for key, _ in events]
