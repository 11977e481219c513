"""Programs as processes of their own: started as a user does, or in a fraction of the time, by a process that forks."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

from deploy.processes.early import WORKER_MODULES
from deploy.processes.fork_server import MAX_REQUEST_BYTES, order
from deploy.processes.launch_plan import Kind, ProcessSpec
from deploy.processes.mps_guard import adopt_orphans

MODULES = (*WORKER_MODULES, "router.api.app", "uvloop", "common.memory.server.server")
ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 60.0


class Program(Protocol):
    """A running one, as `subprocess.Popen` shows it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[str, Sequence[str], BinaryIO], Program]
"""Starts a module with flags and a file for its output."""


def executed(module: str, flags: Sequence[str], output: BinaryIO, *, around: Sequence[str] = ()) -> Program:
    """`python -m MODULE`, run by the command `around`, if any."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [*around, sys.executable, "-m", module, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)


def forked(module: str, flags: Sequence[str], output: BinaryIO) -> Program:
    """The same for what uses no GPU: all has been imported before."""
    return fork_server().start(module, flags, output)


def forked_alone(module: str, flags: Sequence[str], output: BinaryIO) -> Program:
    """The same, with helper processes from the first need of them on."""
    return forked("tests.e2e.at_need", [module, *flags], output)


class Forked:
    """A child of ours that the fork server forked."""

    def __init__(self, pid: int) -> None:
        self.pid, self._pidfd = pid, os.pidfd_open(pid)
        self.returncode: int | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """Its exit status if it has ended, negative for a signal."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended; raises subprocess.TimeoutExpired after `timeout` seconds."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if self.returncode is None and not ended.poll(None if timeout is None else timeout * 1e3):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(self._pidfd, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """That of `baton serve`, in a session of its own, so that Ctrl-C ends the tests, which end what it forked.

    Args:
        around: a command that runs it, and so all that it forks, elsewhere.
    """

    def __init__(self, around: Sequence[str] = ()) -> None:
        adopt_orphans()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}  # a thread is not forked
        command = [*around, sys.executable, "-m", "deploy.processes.fork_server", *MODULES]
        with theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=theirs.fileno(), start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, module: str, flags: Sequence[str], output: BinaryIO) -> Forked:
        orders, to_order = os.pipe()
        with open(orders, "rb") as read, open(to_order, "wb") as write:
            with self._lock:
                socket.send_fds(self._control, [b"fork"], [read.fileno(), output.fileno()])
                pid = self._control.recv(MAX_REQUEST_BYTES)
            assert pid, "the fork server has ended: see its output"
            program = Forked(int(pid))
            write.write(order(ProcessSpec(module, module, tuple(flags), Kind.WORKER)))
        return program

    def close(self) -> None:
        """End it, and nothing that it forked."""
        self._control.close()
        self._process.wait(END_TIMEOUT_S)


@cache
def fork_server() -> ForkServer:
    """One for all tests."""
    return ForkServer()


def end_fork_server() -> None:
    """If there was one."""
    if fork_server.cache_info().currsize:
        fork_server().close()
        fork_server.cache_clear()
