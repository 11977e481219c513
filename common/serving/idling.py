"""How a worker's loop waits when it has nothing to do: awake for a moment, and asleep after that.

A core that sleeps for milliseconds is slow when it wakes, as its caches and its clock have gone: a message that is read
in 15 us takes 200, and so does everything that follows. Beside a GPU that is a good part of a step, so a loop
that had something to do lately sleeps for moments only.
"""

import time
from collections.abc import Callable

import zmq

AWAKE_S = 1.0
MOMENT_S = 50e-6


class Idling:
    """Waits for messages.

    Args:
        poller: of all sockets from which one may come.
        stays_awake: false where there are no cores to spare, as models are computed on them.
    """

    def __init__(self, poller: zmq.Poller, *, stays_awake: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.poller, self._awake_s, self._clock = poller, AWAKE_S if stays_awake else 0.0, clock
        self._until_s = 0.0
        self.num_vain = 0  # waits in a row after which there was none

    def worked(self) -> None:
        """There was something to do."""
        self._until_s = self._clock() + self._awake_s

    def await_message(self, longest_ms: int) -> bool:
        """Until there may be one; false if none came for that long."""
        if self._clock() < self._until_s:
            time.sleep(MOMENT_S)
            return True
        is_there = bool(self.poller.poll(longest_ms))
        self.num_vain = 0 if is_there else self.num_vain + 1
        return is_there
