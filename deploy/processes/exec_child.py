"""Start of a child, which becomes another program and is killed by the kernel when the supervisor dies.

    python exec_child.py SUPERVISOR_PID PROGRAM ARG...

So no child outlives a killed supervisor. The request to the kernel is made here, after the fork, and survives the exec.
So the supervisor runs no code between fork and exec, which would be unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
SOURCE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main() -> None:
    supervisor_pid, program = int(sys.argv[1]), sys.argv[2:]
    die_with(supervisor_pid)
    os.execv(program[0], program)


def launcher(argv: Sequence[str]) -> list[str]:
    """Return the command line of a child of this process that becomes `argv`."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the supervisor's environment with source path, GPU numbers as in nvidia-smi, and threads that sleep.

    Waiting torch threads on a CPU would spin. A step then takes about ten times as long beside other programs, such as
    the router. Spinning threads keep the awaited threads off the cores.
    """
    paths = [SOURCE_ROOT, environ.get("PYTHONPATH", "")]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_WAIT_POLICY": "PASSIVE",
        **environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
    }


def die_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process at the death of the parent; exit if the parent is not the supervisor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:
        sys.exit(f"supervisor {supervisor_pid} is gone")


if __name__ == "__main__":
    main()
