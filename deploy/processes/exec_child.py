"""Become another program, killed by the kernel when the supervisor dies; run as a script by path.

    python exec_child.py SUPERVISOR_PID PROGRAM ARG...

So no child outlives a killed supervisor. The request to the kernel is made here, after the fork, and survives the exec.
So the supervisor runs no code between fork and exec, which would be unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    supervisor_pid, program = int(sys.argv[1]), sys.argv[2:]
    die_with(supervisor_pid)
    os.execv(program[0], program)


def die_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process at the death of the parent; exit if the parent is not the supervisor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:
        sys.exit(f"supervisor {supervisor_pid} is gone")


if __name__ == "__main__":
    main()
