"""The fork server of `baton serve`, begun before the command is imported, because imports of workers take longest.

Imports little itself. Whether there is a GPU is guessed by a file; a fork server of wrong guess is replaced.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

from deploy.processes.exec_child import child_environment, launcher

WORKER_MODULES = (
    "common.device.engine.lean_torch",
    "common.serving.worker.start",
    "prefill_worker.worker",
    "decode_worker.worker",
)
GPU_MODULES = ("common.device.steps.kernel_code", "cuda.bindings.runtime")
"""Imported first, because `kernel_code` reads files while other modules are imported."""
FORK_SERVER = "deploy.processes.fork_server"
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of a fork server; threads would not be forked."""
GPU_FILE = "/dev/nvidiactl"
LEFT_TO_COMMAND = ("-h", "--help", "--fork-server")
"""Flags with which only the command knows whether there will be a fork server."""


@dataclass(frozen=True, slots=True)
class Early:
    """A process that nobody watches yet: a child of this process, in a session of its own."""

    modules: tuple[str, ...]
    pid: int
    control: socket.socket
    output: FileIO

    def end(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.control.close()
        self.output.close()


def begin_early(argv: Sequence[str], environ: Mapping[str, str]) -> Early | None:
    """Begin the fork server that a command will probably want; None for other commands, and if it cannot be begun.

    Args:
        argv: the command's words behind `baton`.
    """
    wants_none = any(word.partition("=")[0] in LEFT_TO_COMMAND for word in argv)
    if argv[:1] != ["serve"] or wants_none:
        return None
    try:
        return begin(modules_for(has_gpu=os.path.exists(GPU_FILE)), environ)
    except (OSError, NotImplementedError):  # too little of something, which the command meets and tells of
        return None


def modules_for(*, has_gpu: bool) -> tuple[str, ...]:
    """Return the modules that workers import."""
    return (*(GPU_MODULES if has_gpu else ()), *WORKER_MODULES)


def begin(modules: tuple[str, ...], environ: Mapping[str, str]) -> Early:
    """Begin a fork server; raises OSError, and NotImplementedError where none can be spawned."""
    command = launcher([sys.executable, "-P", "-m", FORK_SERVER, *modules])
    with contextlib.ExitStack() as ours:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.callback(control.close)
        with theirs:
            read, write = os.pipe()
            output, from_output = FileIO(read, "rb"), FileIO(write, "wb")
            ours.callback(output.close)
            with from_output:
                pid = os.posix_spawn(
                    command[0],
                    command,
                    {**child_environment(environ), **NO_THREADS},
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                        (os.POSIX_SPAWN_DUP2, from_output.fileno(), 1),
                        (os.POSIX_SPAWN_DUP2, from_output.fileno(), 2),
                        *((os.POSIX_SPAWN_CLOSE, number) for number in _inherited()),
                    ],
                    setsid=True,
                )
        ours.pop_all()
    return Early(modules, pid, control, output)


def _inherited() -> list[int]:
    """Return descriptors that a child would get, beside the standard ones."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found
