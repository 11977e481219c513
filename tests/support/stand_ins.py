"""Stand-ins for the programs that a supervisor runs: real processes, signals and exits, and nothing imported."""

import asyncio
import contextlib
import io
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from common.base.json_file import JsonObject
from deploy.processes.console import Console
from deploy.processes.forks import ForkServer
from deploy.processes.keeper import Deadlines
from deploy.processes.launch_plan import Kind, ProcessSpec
from deploy.processes.supervisor import Supervisor
from tests.support.ports import ReservedPort

DEADLINE_S = 60.0

STAND_INS = """
import http.server, json, os, pathlib, signal, subprocess, sys, time

name, directory = sys.argv[1], pathlib.Path(sys.argv[2])

def note(text):
    with (directory / "notes").open("a") as notes:
        notes.write(text + "\\n")

def leave(*_):
    if "waiting" in name:
        note(f"{name} is told")
        while "router left" not in (directory / "notes").read_text():
            time.sleep(0.02)
    note(f"{name} left")
    os._exit(0)

def pids():
    paths = [path for path in directory.glob("*.pid") if path.stem != "memory"]
    return {path.stem: int(path.read_text()) for path in paths}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        workers = [{"id": id, "pid": pid, "device": "cpu", "transport": "none", "standby": None}
                   for id, pid in pids().items()]
        body = {"status": "ok", "problems": [], "workers": {"prefill": [], "decode": workers}, "kv_paths": []}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass

signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in name else leave)
if name == "router":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
if name == "misconfigured":
    print("bad option", file=sys.stderr)
    sys.exit(2)
if name == "parent":
    pid = subprocess.Popen(["sleep", "100"]).pid
    (directory / "child").write_text(str(pid))
if name == "crashing":
    sys.exit(1)
temporary = directory / f"{name}.tmp"
temporary.write_text(str(os.getpid()))
temporary.rename(directory / f"{name}.pid")
while True:
    time.sleep(60)
"""


def kind_of(name: str) -> Kind:
    return {"router": Kind.ROUTER, "memory": Kind.MEMORY}.get(name, Kind.WORKER)


class Stage:
    """A directory with the stand-ins and a free port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "stand_in.py").write_text(STAND_INS)
        self.reserved = ReservedPort()
        self.port = self.reserved.number
        self.imported = f"imported_{self.port}"
        self.log = io.StringIO()
        self.environ = {**os.environ, "PYTHONPATH": str(directory)}

    def specs(self, *workers: str) -> list[ProcessSpec]:
        return [
            ProcessSpec(name, "stand_in", (name, str(self.directory), str(self.port)), kind_of(name))
            for name in ("router", *workers)
        ]

    def supervisor(
        self, *workers: str, start_s: float = DEADLINE_S, worker_modules: tuple[str, ...] = ()
    ) -> Supervisor:
        console = Console(self.log, None)
        return Supervisor(
            self.specs(*workers),
            f"http://127.0.0.1:{self.port}",
            Deadlines(start_s=start_s, router_drain_s=DEADLINE_S, worker_drain_s=DEADLINE_S),
            self.environ,
            console,
            ForkServer(worker_modules, self.environ, console),
        )

    def module(self, code: str = "") -> str:
        """The name of one with that code, for a fork server to import."""
        (self.directory / f"{self.imported}.py").write_text(code)
        return self.imported

    def fork_servers(self) -> set[int]:
        """Process ids of those that import such a module."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = (
                    f"deploy.processes.fork_server\0{self.imported}\0".encode() in (process / "cmdline").read_bytes()
                )
                if is_ours and (process / "comm").read_text() == "fork-server\n":
                    found.add(int(process.name))
        return found

    def pid(self, name: str) -> int:
        return int((self.directory / f"{name}.pid").read_text())

    def notes(self) -> list[str]:
        path = self.directory / "notes"
        return path.read_text().splitlines() if path.exists() else []


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor, on_ready: Callable[[JsonObject], None]) -> AsyncIterator["asyncio.Task[int]"]:
    """The supervisor, ready; ended by force if the test leaves it running."""
    run = asyncio.create_task(supervisor.run(on_ready))
    try:
        await asyncio.wait_for(supervisor.ready.wait(), DEADLINE_S)
        yield run
    finally:
        while not run.done():
            supervisor.stop()
            await asyncio.sleep(0.05)


async def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False  # ended since


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
