"""Processes of clients: with its connection a worker is gone, but only with its process it writes no more."""

import os
import select
import signal
import time
from collections.abc import Callable

from common.memory.blocks.answers import Misbehaved


class Processes:
    """By client; holds a descriptor of each, which stays that process's whatever becomes of its number.

    Readable when one has ended that was waited for.

    Args:
        settle_s: how long after its end a process may still write.
    """

    def __init__(self, settle_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settle_s, self._clock = settle_s, clock
        self._pidfds: dict[int, int] = {}
        self._leaving: dict[int, float | None] = {}  # and since when their process is over
        self._ends = select.epoll()

    def add(self, client: int, pidfd: int | None) -> None:
        """Take the descriptor over; raises Misbehaved if it is none of a process."""
        if pidfd is None:
            raise Misbehaved("no descriptor of its process came along")
        if client in self._pidfds or not _is_pidfd(pidfd):
            os.close(pidfd)
            raise Misbehaved("it greets twice, or with a descriptor of something else than its process")
        self._pidfds[client] = pidfd

    def end(self, client: int) -> None:
        """Kill its process; raises OSError where that is not this one's to do, as in another PID namespace."""
        signal.pidfd_send_signal(self._pidfds[client], signal.SIGKILL)

    def leave(self, client: int) -> None:
        """Its connection has ended: wait for its process to end, if it has said which that is."""
        if client in self._pidfds:
            self._leaving[client] = None
            self._ends.register(self._pidfds[client], select.EPOLLIN | select.EPOLLONESHOT)

    def over(self) -> list[int]:
        """Clients that have left and write no more, each once."""
        now_s = self._clock()
        ended = {pidfd for pidfd, _ in self._ends.poll(0)}
        for client, since_s in self._leaving.items():
            if since_s is None and self._pidfds[client] in ended:
                self._leaving[client] = now_s
        over = [c for c, since_s in self._leaving.items() if since_s is not None and now_s - since_s >= self.settle_s]
        for client in over:
            del self._leaving[client]
            os.close(self._pidfds.pop(client))
        return over

    def fileno(self) -> int:
        return self._ends.fileno()

    def close(self) -> None:
        self._ends.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def _is_pidfd(descriptor: int) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        return any(line.startswith("Pid:") for line in lines)
