"""Processes of clients: with its connection a worker is gone, but only with its process it writes no more."""

import os
import select
import time
from collections.abc import Callable

from common.memory.exchange import Misbehaved


class Processes:
    """By client; holds a descriptor of each, which stays that process's whatever becomes of its number.

    Args:
        settle_s: how long after its end a process may still write.
    """

    def __init__(self, settle_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settle_s, self._clock = settle_s, clock
        self._pidfds: dict[int, int] = {}
        self._leaving: dict[int, float | None] = {}  # and since when their process is over

    def add(self, client: int, pidfd: int | None) -> None:
        """Take the descriptor over; raises Misbehaved if it is none of a process."""
        if pidfd is None:
            raise Misbehaved("no descriptor of its process came along")
        if client in self._pidfds or not _is_pidfd(pidfd):
            os.close(pidfd)
            raise Misbehaved("it greets twice, or with a descriptor of something else than its process")
        self._pidfds[client] = pidfd

    def leave(self, client: int) -> int | None:
        """Its connection has ended; returns the descriptor that becomes readable when its process has."""
        pidfd = self._pidfds.get(client)
        if pidfd is not None:
            self._leaving[client] = None
        return pidfd

    def over(self) -> list[int]:
        """Clients that have left and write no more; those that never said who they are have no part in it."""
        now_s, over = self._clock(), []
        for client, since_s in list(self._leaving.items()):
            if since_s is None and not select.select([self._pidfds[client]], [], [], 0)[0]:
                continue
            self._leaving[client] = since_s = now_s if since_s is None else since_s
            if now_s - since_s >= self.settle_s:
                del self._leaving[client]
                os.close(self._pidfds.pop(client))
                over.append(client)
        return over

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def _is_pidfd(descriptor: int) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        return any(line.startswith("Pid:") for line in lines)
