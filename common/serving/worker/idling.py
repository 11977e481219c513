"""How a worker's loop waits when it has nothing to do: awake for a moment, asleep after that (see `memory.vigil`)."""

import time
from collections.abc import Callable

import zmq

from common.memory.base.poller import gpu_awake_s, nap


class Idling:
    """Waits for messages.

    Args:
        poller: of all sockets from which one may come; who is told that one may be there reads them all.
        on_gpu: elsewhere models are computed on the cores, and none is kept awake.
    """

    def __init__(self, poller: zmq.Poller, *, on_gpu: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.poller, self._awake_s, self._clock = poller, gpu_awake_s() if on_gpu else 0.0, clock
        self._until_s = 0.0
        self.num_vain = 0  # waits in a row after which there was none

    def worked(self) -> None:
        """There was something to do."""
        self._until_s = self._clock() + self._awake_s

    def await_message(self, longest_ms: int) -> bool:
        """Until there may be one; false if none came for that long."""
        if self._clock() < self._until_s:
            nap(source.fileno() for source, _ in self.poller.sockets)
            return True
        is_there = bool(self.poller.poll(longest_ms))
        self.num_vain = 0 if is_there else self.num_vain + 1
        return is_there
