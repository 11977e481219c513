"""`python -m tests.e2e.fork_server SOCKET`: forks programs under test, having imported what takes seconds for all.

SOCKET is the number of an inherited descriptor (of SOCK_SEQPACKET). A packet there is what tells a spare process what
to become, with two descriptors: of the program's output, and of a pipe for how it ended. The answer is its pid, with a
descriptor of the process. At the end of its input all programs are killed.

Nothing has happened in a program's process but imports: it has no thread, no open file, and no device has been touched.
"""

import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from deploy.spare import become
from deploy.spares import SHARED_MODULES

MODULES = (*SHARED_MODULES, "router.app", "uvloop", "common.memory.server")
MAX_ORDER_BYTES = 1 << 16
FIRST_FD = 3
STATUS = struct.Struct("=i")
"""How a program ended, as `os.waitpid` says it."""


class Child(NamedTuple):
    pid: int
    pidfd: int
    status: int


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads after the imports: a program would be forked without them"
    gc.freeze()
    order = ForkServer(socket.socket(fileno=int(sys.argv[1]))).next_to_become()
    if order:
        become(order)


class ForkServer:
    """Parent of the programs."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, Child] = {}  # by pidfd
        self.poller = select.poll()
        self.poller.register(control, select.POLLIN)

    def next_to_become(self) -> bytes:
        """In each forked process what it is to become; in this one nothing, at the end of its input."""
        while True:
            for ready, _ in self.poller.poll():
                if ready != self.control.fileno():
                    self._reap(self.children.pop(ready))
                    continue
                order, descriptors, _, _ = socket.recv_fds(self.control, MAX_ORDER_BYTES, 2)
                if not order:
                    self._end()
                    return b""
                output, status = descriptors
                pid = os.fork()
                if pid == 0:
                    _take_over(output)
                    return order
                os.close(output)
                self._watch(Child(pid, os.pidfd_open(pid), status))

    def _watch(self, child: Child) -> None:
        self.children[child.pidfd] = child
        self.poller.register(child.pidfd, select.POLLIN)
        socket.send_fds(self.control, [str(child.pid).encode()], [child.pidfd])

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        with suppress(BrokenPipeError):  # nobody wants to know
            os.write(child.status, STATUS.pack(status))
        self.poller.unregister(child.pidfd)
        os.close(child.pidfd)
        os.close(child.status)

    def _end(self) -> None:
        for child in self.children.values():
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in self.children.values():
            self._reap(child)


def _take_over(output: int) -> None:
    """Write there, and have no other file."""
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.closerange(FIRST_FD, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    main()
