"""The supervisor with stand-ins for the router and the workers: real processes, signals and exits."""

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from deploy import spares
from deploy.console import Console
from deploy.health import Health
from deploy.launch_plan import SOURCE_ROOT, Kind, ProcessSpec
from deploy.supervisor import Deadlines, Supervisor
from tests.ports import ReservedPort

DEADLINE_S = 60.0

STAND_INS = """
import http.server, json, os, pathlib, signal, sys, time

name, directory = sys.argv[1], pathlib.Path(sys.argv[2])

def note(text):
    with (directory / "notes").open("a") as notes:
        notes.write(text + "\\n")

def leave(*_):
    note(f"{name} left")
    os._exit(0)

def pids():
    paths = [path for path in directory.glob("*.pid") if path.stem != "memory"]
    return {path.stem: int(path.read_text()) for path in paths}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        workers = [{"id": id, "pid": pid, "device": "cpu", "transport": "none", "standby": None}
                   for id, pid in pids().items()]
        body = {"status": "ok", "missing": [], "workers": {"decode": workers}, "kv_paths": []}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in name else leave)
if name == "router":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
if name == "misconfigured":
    print("bad option", file=sys.stderr)
    sys.exit(2)
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
        self.log = io.StringIO()
        self.environ = {**os.environ, "PYTHONPATH": str(directory)}

    def specs(self, *workers: str) -> list[ProcessSpec]:
        return [
            ProcessSpec(name, "stand_in", (name, str(self.directory), str(self.port)), kind_of(name))
            for name in ("router", *workers)
        ]

    def supervisor(self, *workers: str, start_s: float = DEADLINE_S, spare_modules: tuple[str, ...] = ()) -> Supervisor:
        return Supervisor(
            self.specs(*workers),
            f"http://127.0.0.1:{self.port}",
            Deadlines(start_s=start_s, router_drain_s=DEADLINE_S, worker_drain_s=DEADLINE_S),
            self.environ,
            Console(self.log, None),
            spare_modules,
        )

    def spare_pids(self) -> set[int]:
        """Of processes that were started as spares, whatever they have become."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"deploy.spare\0mark_{self.port}\0".encode() in (process / "cmdline").read_bytes():
                    found.add(int(process.name))
        return found

    def pid(self, name: str) -> int:
        return int((self.directory / f"{name}.pid").read_text())

    def notes(self) -> list[str]:
        path = self.directory / "notes"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.reserved.close()


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor, on_ready: Callable[[Health], None]) -> AsyncIterator["asyncio.Task[int]"]:
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
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_starts_announces_once_and_drains_the_router_first_and_memory_last(stage: Stage) -> None:
    announced: list[Health] = []
    supervisor = stage.supervisor("memory", "decode-0", "decode-1")
    async with running(supervisor, announced.append) as run:
        assert len(announced) == 1
        pids = {worker.pid for worker in announced[0].workers}
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not any(is_alive(pid) for pid in pids)
    assert stage.notes()[0] == "router left"
    assert sorted(stage.notes()[1:3]) == ["decode-0 left", "decode-1 left"]
    assert stage.notes()[3:] == ["memory left"]


async def test_a_killed_worker_comes_back(stage: Stage) -> None:
    supervisor = stage.supervisor("decode-0")
    async with running(supervisor, lambda _: None) as run:
        first = stage.pid("decode-0")
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: stage.pid("decode-0") != first)
        assert "decode-0 ended with signal SIGKILL; restarting at once" in stage.log.getvalue()
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not is_alive(stage.pid("decode-0"))


async def test_a_killed_worker_comes_back_in_the_spare_process_and_a_killed_spare_costs_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "NEXT_S", 0.0)
    mark = f"mark_{stage.port}"
    (stage.directory / f"{mark}.py").write_text("")
    supervisor = stage.supervisor("decode-0", spare_modules=(mark,))
    async with running(supervisor, lambda _: None) as run:
        first = stage.pid("decode-0")
        await eventually(lambda: len(stage.spare_pids()) == 1)
        [spare] = stage.spare_pids()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: stage.pid("decode-0") == spare)
        assert f"decode-0 is started in the spare process, pid {spare}" in stage.log.getvalue()
        await eventually(lambda: len(stage.spare_pids()) == 2)
        for pid in sorted(stage.spare_pids(), key=lambda pid: pid == spare):  # the next spare first
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: stage.pid("decode-0") not in (first, spare) and is_alive(stage.pid("decode-0")))
        await eventually(lambda: bool(stage.spare_pids()))
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not is_alive(stage.pid("decode-0"))
    assert not stage.spare_pids()


@pytest.mark.parametrize(("worker", "code"), [("misconfigured", 2), ("crashing", 1)])
async def test_a_start_that_cannot_succeed_ends_everything(stage: Stage, worker: str, code: int) -> None:
    supervisor = stage.supervisor("decode-0", worker)
    assert await asyncio.wait_for(supervisor.run(lambda _: None), DEADLINE_S) == code
    assert supervisor.failure == f"{worker} ended with exit code {code} before the system was ready"
    assert supervisor.failure in stage.log.getvalue()
    if worker == "misconfigured":
        assert "bad option" in stage.log.getvalue()
        assert "restarting" not in stage.log.getvalue()
    assert not any(is_alive(int(path.read_text())) for path in stage.directory.glob("*.pid"))


async def test_a_start_that_takes_too_long_is_given_up(stage: Stage) -> None:
    supervisor = stage.supervisor("misconfigured-not", start_s=0.0)
    assert await asyncio.wait_for(supervisor.run(lambda _: None), DEADLINE_S) == 1
    assert supervisor.failure == "not ready after 0 s: the router does not answer"


async def test_a_second_stop_kills_what_does_not_drain(stage: Stage) -> None:
    supervisor = stage.supervisor("stubborn-0")
    async with running(supervisor, lambda _: None) as run:
        pid = stage.pid("stubborn-0")
        supervisor.stop()
        await eventually(lambda: stage.notes() == ["router left"])
        assert is_alive(pid)
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not is_alive(pid)


SUPERVISOR_PROGRAM = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_supervisor import Stage
stage = Stage(Path({directory!r}))
asyncio.run(stage.supervisor("decode-0").run(lambda health: print("ready", flush=True)))
"""


def test_no_child_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    program = SUPERVISOR_PROGRAM.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        worker = int((tmp_path / "decode-0.pid").read_text())
        assert is_alive(worker)
        supervisor.kill()
    deadline_s = time.monotonic() + DEADLINE_S
    while is_alive(worker):
        assert time.monotonic() < deadline_s, "the worker outlived its supervisor"
        time.sleep(0.02)
