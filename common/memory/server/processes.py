"""Processes of clients, because a worker's writes end with the process, not with the connection."""

import os
import select
import signal
import time

from common.memory.blocks.answers import ProtocolError


class Processes:
    """Process descriptors by client; a descriptor stays valid even after reuse of the process id.

    The object is selectable: readable when an awaited process has ended.

    Args:
        settle_s: time for which a process may still write after its end.
    """

    def __init__(self, settle_s: float) -> None:
        self.settle_s = settle_s
        self._pidfds: dict[int, int] = {}
        self._leaving: dict[int, float | None] = {}  # end of the process, None if it lives
        self._ends = select.epoll()

    def add(self, client: int, pidfd: int | None) -> None:
        """Take a process descriptor over; raises ProtocolError for any other descriptor."""
        if pidfd is None:
            raise ProtocolError("no descriptor of its process came along")
        if client in self._pidfds or not _is_pidfd(pidfd):
            os.close(pidfd)
            raise ProtocolError("it greets twice, or with a descriptor of something else than its process")
        self._pidfds[client] = pidfd

    def end(self, client: int) -> None:
        """Kill a client's process; raises OSError if not permitted, for example in another PID namespace."""
        signal.pidfd_send_signal(self._pidfds[client], signal.SIGKILL)

    def leave(self, client: int) -> None:
        """Wait for the end of a disconnected client's process, if known."""
        if client in self._pidfds:
            self._leaving[client] = None
            self._ends.register(self._pidfds[client], select.EPOLLIN | select.EPOLLONESHOT)

    def over(self) -> list[int]:
        """Return clients whose processes have ended and settled, each once."""
        now_s = time.monotonic()
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
