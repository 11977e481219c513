"""Holds a private MPS daemon for as long as its stdin is open; run as a script by its path.

    python mps_guard.py PROBE_COMMAND...

Prints `ready`, or one line that says why there is no MPS. The daemon detaches itself, so that a
supervisor killed outright could not end it: the guard can, since the end of its stdin reaches it
always. Invariant: whatever the guard started, detached or not, is gone when the guard is.
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
PR_SET_CHILD_SUBREAPER = 36


def main(probe: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the end of stdin ends it, after the last client
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
    """`environ`, except GPU indices: the daemon would number its GPUs anew, and clients choose among those again."""
    is_by_uuid = environ.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    return {name: value for name, value in environ.items() if is_by_uuid or name != "CUDA_VISIBLE_DEVICES"}


def start_daemon(environ: Mapping[str, str]) -> str:
    """What went wrong, or an empty string when it runs and answers."""
    problem = run([CONTROL, "-d"], environ, START_DEADLINE_S)
    if problem:
        return problem
    deadline_s = time.monotonic() + ANSWER_DEADLINE_S  # it detaches before it listens
    while problem := run([CONTROL], environ, ANSWER_DEADLINE_S, "get_default_active_thread_percentage\n"):
        if time.monotonic() > deadline_s:
            return problem
        time.sleep(POLL_INTERVAL_S)
    return ""


def try_client(probe: list[str]) -> str:
    """What went wrong, or an empty string when CUDA programs are served."""
    problem = run(probe, os.environ, PROBE_DEADLINE_S)
    return f"a trial client failed: {problem}" if problem else ""


def run(argv: list[str], environ: Mapping[str, str], deadline_s: float, text: str = "") -> str:
    """Run to the end, with `text` as its input; why that failed, or an empty string.

    Its output goes to a file: a daemon keeps a pipe open, and reading that would wait for the daemon.
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
    """Reap every descendant; kill those that are left at the deadline, and give up on what survives that."""
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
    """Process ids whose parent is this process."""
    mine = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state_and_parent = path.read_text().rpartition(")")[2].split()[:2]
            if state_and_parent[1] == str(os.getpid()):
                mine.append(int(path.parent.name))
    return mine


if __name__ == "__main__":
    main(sys.argv[1:])
