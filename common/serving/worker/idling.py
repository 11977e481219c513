"""Waits of an idle worker's loop: awake for a moment, then asleep (see `common.memory.base.poller`)."""

import time
from collections.abc import Callable

import zmq

from common.memory.base.poller import gpu_awake_s, nap


class Idling:
    """Waiter for messages.

    Args:
        poller: holds all sockets; after a hint of a message, the caller reads all sockets.
        on_gpu: false keeps no core awake, because models then run on the cores.
    """

    def __init__(self, poller: zmq.Poller, *, on_gpu: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.poller, self._awake_s, self._clock = poller, gpu_awake_s() if on_gpu else 0.0, clock
        self._until_s = 0.0
        self.num_vain = 0  # waits in a row without a message

    def worked(self) -> None:
        """Stay awake for a while, because there was work to do."""
        self._until_s = self._clock() + self._awake_s

    def await_message(self, longest_ms: int) -> bool:
        """Wait until a message may be there; return False after `longest_ms` without a message."""
        if self._clock() < self._until_s:
            nap(source.fileno() for source, _ in self.poller.sockets)
            return True
        is_there = bool(self.poller.poll(longest_ms))
        self.num_vain = 0 if is_there else self.num_vain + 1
        return is_there
