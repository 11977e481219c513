"""Hold a private MPS daemon for as long as stdin is open; run as a script by path.

    python mps_guard.py PROBE_COMMAND...

Prints `ready`, or a line with the reason for no MPS. The daemon detaches itself, so a killed supervisor could not end
it. The guard can, because the end of stdin always reaches the guard.

Invariant: when the guard is gone, so is everything started by the guard, detached or not.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_DEADLINE_S = 15.0
ANSWER_DEADLINE_S = 5.0
PROBE_DEADLINE_S = 45.0
QUIT_DEADLINE_S = 10.0
KILL_DEADLINE_S = 5.0
POLL_INTERVAL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def main(probe: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the end of stdin ends the guard, after the last client
    adopt_orphans()
    try:
        problem = start_daemon(daemon_environment(os.environ)) or try_client(probe)
        print(problem or "ready", flush=True)
        if not problem:
            os.read(sys.stdin.fileno(), 1)
    finally:
        run([CONTROL], os.environ, QUIT_DEADLINE_S, "quit\n")
        end_adopted(time.monotonic() + QUIT_DEADLINE_S)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, such as a daemon."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def daemon_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without GPU indices, because the daemon renumbers GPUs and clients choose again."""
    is_by_uuid = environ.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    return {name: value for name, value in environ.items() if is_by_uuid or name != "CUDA_VISIBLE_DEVICES"}


def start_daemon(environ: Mapping[str, str]) -> str:
    """Start the daemon; return the problem, or an empty string once the daemon answers."""
    problem = run([CONTROL, "-d"], environ, START_DEADLINE_S)
    if problem:
        return problem
    deadline_s = time.monotonic() + ANSWER_DEADLINE_S  # the daemon detaches before listening
    while problem := run([CONTROL], environ, ANSWER_DEADLINE_S, "get_default_active_thread_percentage\n"):
        if time.monotonic() > deadline_s:
            return problem
        time.sleep(POLL_INTERVAL_S)
    return ""


def try_client(probe: list[str]) -> str:
    """Run a trial client; return the problem, or an empty string if CUDA programs are served."""
    problem = run(probe, os.environ, PROBE_DEADLINE_S)
    return f"a trial client failed: {problem}" if problem else ""


def run(argv: list[str], environ: Mapping[str, str], deadline_s: float, text: str = "") -> str:
    """Run a program to its end with `text` as input; return the reason of a failure, or an empty string.

    Output goes to a file, because a daemon keeps a pipe open and reading would wait for the daemon.
    """
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                argv, input=text.encode(), stdout=output, stderr=output, env=environ, timeout=deadline_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{Path(argv[0]).name} did not end within {deadline_s:g} s"
        except OSError as error:
            return f"{Path(argv[0]).name}: {error.strerror}"
        if done.returncode == 0:
            return ""
        output.seek(0)
        said = output.read().decode("utf-8", "replace").split("\n")
        last_line = next((line for line in reversed(said) if line.strip()), "no reason given")
        return f"{Path(argv[0]).name} ended with exit code {done.returncode}: {last_line}"


def end_adopted(deadline_s: float) -> None:
    """Reap every descendant; kill survivors at the deadline, and give up soon after."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline_s + KILL_DEADLINE_S:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                continue
            if time.monotonic() > deadline_s:
                for child in children():
                    os.kill(child, signal.SIGKILL)
            time.sleep(POLL_INTERVAL_S)


def children() -> list[int]:
    """Return the ids of this process's children."""
    mine = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state_and_parent = path.read_text().rpartition(")")[2].split()[:2]
            if state_and_parent[1] == str(os.getpid()):
                mine.append(int(path.parent.name))
    return mine


if __name__ == "__main__":
    main(sys.argv[1:])
