"""The supervisor with stand-ins for the router and the workers: real processes, signals and exits."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.base.json_file import JsonObject
from deploy.operate.health import pids
from deploy.processes.launch_plan import SOURCE_ROOT
from tests.support.stand_ins import DEADLINE_S, Stage, eventually, is_alive, no_more_files, running


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.reserved.close()


async def test_starts_announces_once_and_drains_the_router_first_and_memory_last(stage: Stage) -> None:
    announced: list[JsonObject] = []
    supervisor = stage.supervisor("memory", "decode-0", "decode-1")
    async with running(supervisor, announced.append) as run:
        await eventually((stage.directory / "memory.pid").exists)  # it has a handler
        assert len(announced) == 1
        workers = pids(announced[0])
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not any(is_alive(pid) for pid in workers)
    assert stage.notes()[0] == "router left"
    assert sorted(stage.notes()[1:3]) == ["decode-0 left", "decode-1 left"]
    assert stage.notes()[3:] == ["memory left"]


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "W [baton] decode-0 ended with signal SIGKILL; restarting at once"),
                         (signal.SIGTERM, "I [baton] decode-0 ended with exit code 0; restarting at once")],
)  # fmt: skip
async def test_a_killed_worker_comes_back_and_so_does_a_drained_one(
    stage: Stage, number: signal.Signals, said: str
) -> None:
    supervisor = stage.supervisor("decode-0")
    async with running(supervisor, lambda _: None) as run:
        first = stage.pid("decode-0")
        os.kill(first, number)
        await eventually(lambda: stage.pid("decode-0") != first)
        assert said in stage.log.getvalue()
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not is_alive(stage.pid("decode-0"))


async def test_a_router_whose_port_another_has_is_not_started_again_and_all_ends_in_order(stage: Stage) -> None:
    supervisor = stage.supervisor("memory", "decode-0")
    async with running(supervisor, lambda _: None) as run:
        await eventually((stage.directory / "memory.pid").exists)  # it has a handler
        router = supervisor.keeper.pid("router")
        assert router is not None
        os.kill(router, signal.SIGUSR1)  # it ends with RELIEVED_STATUS
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert stage.notes() == ["decode-0 left", "memory left"]
    assert "another router has taken the port over" in stage.log.getvalue()


@pytest.mark.medium
@pytest.mark.parametrize("forks", [False, True])
async def test_a_worker_for_which_there_is_no_room_comes_back_when_there_is(forks: bool, stage: Stage) -> None:
    supervisor = stage.supervisor("decode-0", "decode-1", worker_modules=(stage.module(),) if forks else ())
    async with running(supervisor, lambda _: None) as run:
        first, other = stage.pid("decode-0"), stage.pid("decode-1")
        with no_more_files():
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: "decode-0 could not be started ([Errno 24]" in stage.log.getvalue())
        await eventually(lambda: stage.pid("decode-0") != first)
        assert is_alive(other) and stage.pid("decode-1") == other
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0


@pytest.mark.medium
@pytest.mark.parametrize(("worker", "code"), [("misconfigured", 2), ("crashing", 1)])
async def test_a_start_that_cannot_succeed_ends_everything(stage: Stage, worker: str, code: int) -> None:
    supervisor = stage.supervisor("decode-0", worker)
    assert await asyncio.wait_for(supervisor.run(lambda _: None), DEADLINE_S) == code
    told = ": bad option" if worker == "misconfigured" else ""
    assert supervisor.failure == f"{worker} ended with exit code {code} before the system was ready{told}"
    assert supervisor.failure in stage.log.getvalue()
    if worker == "misconfigured":
        assert "restarting" not in stage.log.getvalue()
    assert not any(is_alive(int(path.read_text())) for path in stage.directory.glob("*.pid"))


async def test_a_start_that_takes_too_long_is_given_up(stage: Stage) -> None:
    supervisor = stage.supervisor("misconfigured-not", start_s=0.0)
    assert await asyncio.wait_for(supervisor.run(lambda _: None), DEADLINE_S) == 1
    assert supervisor.failure == "not ready after 0 s: the router does not answer"
    assert supervisor._missing({"status": "ok", "workers": ["of another program"]}) == "the router does not answer"


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


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
async def test_a_closed_terminal_ends_what_nohup_does_not_protect(stage: Stage, handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        supervisor = stage.supervisor("decode-0")
        async with running(supervisor, lambda _: None) as run:
            os.kill(os.getpid(), signal.SIGHUP)
            if handler is signal.SIG_IGN:
                first = stage.pid("decode-0")
                os.kill(first, signal.SIGKILL)
                await eventually(lambda: stage.pid("decode-0") != first)  # the supervisor goes on
                supervisor.stop()
            assert await asyncio.wait_for(run, DEADLINE_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


SUPERVISOR_PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.support.stand_ins import Stage
stage = Stage(Path({directory!r}))
supervisor = stage.supervisor("decode-0", worker_modules=(stage.module(),) if {forks} else ())
asyncio.run(supervisor.run(lambda health: print("ready", *stage.fork_servers(), flush=True)))
"""


@pytest.mark.medium
@pytest.mark.parametrize("forks", [False, True])
def test_no_child_outlives_a_supervisor_that_was_killed(forks: bool, tmp_path: Path) -> None:
    program = SUPERVISOR_PROGRAM.format(directory=str(tmp_path), forks=forks)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        ready, *others = supervisor.stdout.readline().split()
        assert ready == "ready" and len(others) == forks
        pids = [int((tmp_path / "decode-0.pid").read_text()), *map(int, others)]
        assert all(map(is_alive, pids))
        supervisor.kill()
    deadline_s = time.monotonic() + DEADLINE_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline_s, "they outlived their supervisor"
        time.sleep(0.02)
