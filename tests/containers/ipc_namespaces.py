"""What CUDA IPC, and Baton with it, can do between namespaces, as containers have them; by hand, as root, beside a GPU:

    python3 -m tests.containers.ipc_namespaces [--mps] [--peer] [--pieces-only]
    python3 -m tests.containers.ipc_namespaces --cpu

For each isolation it prints whether one process reads device memory that another one made, by a handle of CUDA IPC and
by a descriptor of a file; and whether a memory server, a prefill and a decode worker, each in namespaces of its own,
load the demo model, prove their path, and complete a prompt, or what they said. Beside torch it needs the `cuda` extra
and the router's packages.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PORT = 8917
MAKE_S = 60.0
SERVE_S = 150.0
LOSS = re.compile(r"^\S+ [EWC] \[[^\]]*\] (.*)$|^python -m \S+: (.*)$", re.MULTILINE)
NUMBERED = 'n=$1; shift; while [ $n -gt 0 ]; do (:); n=$((n-1)); done; "$@"; exit $?'
"""A shell that has used up some process ids before it starts the program."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Namespaces that each process has for itself."""

    name: str
    flags: tuple[str, ...] = ()
    has_equal_pids: bool = True  # in PID namespaces of their own

    def argv(self, number: int, program: list[str]) -> list[str]:
        """`program` in there, as the process of that number."""
        if not self.flags:
            return program
        steps = ["sh", "-c", NUMBERED, "sh", "0" if self.has_equal_pids else str(10 * number), *program]
        if "--mount" in self.flags:  # containers have a /dev/shm of their own
            steps = ["sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh", *steps]
        return ["unshare", *self.flags, *steps]


PID = ("--pid", "--fork", "--kill-child", "--mount-proc")
ISOLATIONS = (
    Isolation("none"),
    Isolation("mount, /dev/shm", ("--mount",)),
    Isolation("network", ("--net",)),
    Isolation("IPC", ("--ipc",)),
    Isolation("PID, other ids", PID, has_equal_pids=False),
    Isolation("PID, equal ids", PID),
    Isolation("mount, network, IPC", ("--mount", "--net", "--ipc")),
    Isolation("all, other ids", ("--mount", "--net", "--ipc", *PID), has_equal_pids=False),
    Isolation("all, equal ids", ("--mount", "--net", "--ipc", *PID)),
)


@contextlib.contextmanager
def process(isolation: Isolation, number: int, program: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """One that is gone when the context ends, with all that it started."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = isolation.argv(number, [sys.executable, *program])
    with log.open("wb") as output:
        started = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait(15)


def shared_piece(isolation: Isolation, way: str, reader_device: int, work: Path) -> str:
    """What the reader said."""
    path, log = work / f"{way}.sock", work / "reader.log"
    module = ["-m", "tests.containers.shared_piece"]
    with process(isolation, 1, [*module, "make", way, str(path), "0"], work / "maker.log") as maker:
        until_s = time.monotonic() + MAKE_S
        while not path.exists():
            if maker.poll() is not None or time.monotonic() > until_s:
                return f"not made: {_last_line(work / 'maker.log')}"
            time.sleep(0.05)
        with process(isolation, 2, [*module, "read", way, str(path), str(reader_device)], log) as reader:
            try:
                reader.wait(MAKE_S)
            except subprocess.TimeoutExpired:
                return "no answer"
    return _last_line(log)


def serving(isolation: Isolation, device: str, work: Path) -> str:
    """Whether a prompt is completed, and by which path, or what went wrong."""
    router, memory = f"ipc://{work}/router.sock", f"{work}/memory.sock"
    net = ["--net-router-endpoint", router]
    model = ["--model-path", "deploy/demo_model"]
    worker = [*model, *net, "--worker-device", device, "--worker-memory-socket", memory,
              "--kv-pool-bytes", str(1 << 28)]  # fmt: skip
    programs = {
        "router": ["-m", "router", *model, *net, "--router-port", str(PORT)],
        "memory": ["-m", "common.memory", "--memory-device", device, "--memory-socket", memory, *net],
        "prefill": ["-m", "prefill_worker", "--worker-id", "prefill", *worker],
        "decode": ["-m", "decode_worker", "--worker-id", "decode", *worker,
                   "--net-handoff-endpoint", f"ipc://{work}/decode.sock"],
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        started = {}
        for number, (name, program) in enumerate(programs.items()):
            where = ISOLATIONS[0] if name == "router" else isolation
            started[name] = stack.enter_context(process(where, number, program, work / f"{name}.log"))
        until_s = time.monotonic() + SERVE_S
        while time.monotonic() < until_s:
            ended = [name for name, each in started.items() if each.poll() is not None]
            if ended:
                return f"{ended[0]} ended: {_problem(work / f'{ended[0]}.log')}"
            health = _fetched("/health")
            if health and health["status"] == "ok" and health["kv_paths"]:
                return _completed(health)
            time.sleep(0.2)
    return "not ready: " + "; ".join(f"{name}: {_problem(work / f'{name}.log')}" for name in ("prefill", "decode"))


def _completed(health: dict[str, Any]) -> str:
    (path,) = health["kv_paths"]
    answer = _fetched("/v1/completions", {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0})
    if path["error"]:
        return f"the path failed: {path['error']}"
    return f"ok over {path['transport']}: {answer['choices'][0]['text']!r}" if answer else "no answer"


def _fetched(path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data=data, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(json.load(response))
    except (OSError, ValueError):
        return None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _problem(log: Path) -> str:
    """The last that a log warns of."""
    found = LOSS.findall(log.read_text(errors="replace"))
    return "".join(found[-1]) if found else _last_line(log)


@contextlib.contextmanager
def mps(work: Path) -> Iterator[None]:
    """A daemon outside of all isolations, for whose clients every process is told where it is."""
    for name in ("pipe", "log"):
        (work / name).mkdir()
        os.environ[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str(work / name)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", timeout=60, check=False)


def _mps_servers() -> str:
    asked = subprocess.run(
        ["nvidia-cuda-mps-control"], input=b"get_server_list\n", capture_output=True, timeout=60, check=False
    )
    return "MPS" if asked.stdout.strip() else "not through MPS"


def main() -> int:
    """Prints a row for each isolation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mps", action="store_true", help="all of them are clients of MPS")
    parser.add_argument("--peer", action="store_true", help="who reads a piece is on another GPU than who made it")
    parser.add_argument("--cpu", action="store_true", help="Baton alone, on the CPU, where memory is files")
    parser.add_argument("--pieces-only", action="store_true", help="without Baton's programs")
    args = parser.parse_args()
    print("| own namespaces | by handle | by descriptor | Baton |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-ns-", dir="/var/tmp") as base, contextlib.ExitStack() as stack:
        if args.mps:
            stack.enter_context(mps(Path(base)))
        for number, isolation in enumerate(ISOLATIONS):
            work = Path(base) / str(number)
            work.mkdir(mode=0o700)
            ways = ["-", "-"]
            if not args.cpu:
                ways = [shared_piece(isolation, way, int(args.peer), work) for way in ("handle", "file")]
            baton = "-" if args.pieces_only else serving(isolation, "cpu" if args.cpu else "cuda:0", work)
            through = f", {_mps_servers()}" if args.mps else ""
            print(f"| {isolation.name}{through} | {' | '.join(ways)} | {baton} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
