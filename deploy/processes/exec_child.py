"""Becomes another program that the kernel kills when the supervisor dies; run as a script by its path.

    python exec_child.py SUPERVISOR_PID PROGRAM ARG...

So no child outlives a supervisor that was killed outright. The request is made here, after the
fork, and survives the exec: the supervisor needs no code between fork and exec, which is unsafe in
a process with threads.
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
    """Have the kernel kill this process when its parent dies, which has to be the supervisor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:
        sys.exit(f"supervisor {supervisor_pid} is gone")


if __name__ == "__main__":
    main()
