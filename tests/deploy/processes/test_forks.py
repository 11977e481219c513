"""Workers of a fork server: children of the supervisor, in processes in which nothing has happened but imports."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.processes import early, forks
from deploy.processes.child import Child
from deploy.processes.console import Console
from deploy.processes.early import GPU_MODULES, WORKER_MODULES
from deploy.processes.forks import ForkServer
from deploy.processes.launch_plan import Kind, ProcessSpec
from tests.support.stand_ins import DEADLINE_S, Stage, eventually, is_alive, no_more_files, running


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.reserved.close()


@asynccontextmanager
async def fork_server(stage: Stage, code: str = "") -> AsyncIterator[ForkServer]:
    """One that has imported this."""
    server = ForkServer((stage.module(code),), stage.environ, Console(stage.log, None))
    await server.begin()
    yield server
    await server.end()
    assert not stage.fork_servers()


async def forked(server: ForkServer, stage: Stage, code: str, **env: str) -> Child:
    (stage.directory / "program.py").write_text(code)
    child = await server.fork(ProcessSpec("decode-0", "program", ("flag",), Kind.WORKER, env))
    assert child is not None
    return child


@pytest.mark.medium
async def test_every_worker_is_forked_as_often_as_it_dies(stage: Stage) -> None:
    supervisor = stage.supervisor("decode-0", "prefill-0", worker_modules=(stage.module(),))
    async with running(supervisor, lambda _: None) as run:
        servers = stage.fork_servers()
        assert len(servers) == 1
        for _ in range(3):
            pid = stage.pid("decode-0")
            for worker in ("decode-0", "prefill-0"):
                status = Path(f"/proc/{stage.pid(worker)}/status").read_text()
                command = Path(f"/proc/{stage.pid(worker)}/cmdline").read_bytes().rstrip(b"\0").decode()
                assert command.startswith(f"python -m stand_in {worker} "), "as `ps` and `pkill -f` find it"
                assert f"Name:\t{worker}\n" in status and f"PPid:\t{os.getpid()}\n" in status
                assert os.getsid(stage.pid(worker)) == stage.pid(worker), "Ctrl-C in a terminal reaches it"
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: stage.pid("decode-0") != pid)  # type: ignore[misc]
        assert stage.log.getvalue().count("decode-0 ended with signal SIGKILL; restarting") == 3
        assert stage.fork_servers() == servers
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert stage.notes() == ["router left", *stage.notes()[1:]] and len(stage.notes()) == 3
    assert not stage.fork_servers()


async def test_workers_outlive_a_fork_server_that_is_killed_and_another_takes_its_place(stage: Stage) -> None:
    supervisor = stage.supervisor("decode-0", worker_modules=(stage.module(),))
    async with running(supervisor, lambda _: None) as run:
        worker, [server] = stage.pid("decode-0"), stage.fork_servers()
        os.kill(server, signal.SIGKILL)
        await eventually(lambda: len(stage.fork_servers() - {server}) == 1)
        assert "fork-server ended with signal SIGKILL; another in 0 s" in stage.log.getvalue()
        assert is_alive(worker)
        os.kill(worker, signal.SIGKILL)
        await eventually(lambda: stage.pid("decode-0") != worker)
        assert "decode-0 ended with signal SIGKILL; restarting at once" in stage.log.getvalue()
        assert Path(f"/proc/{stage.pid('decode-0')}/comm").read_text() == "decode-0\n"
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0


@pytest.mark.medium
async def test_a_worker_does_without_a_fork_server_that_hangs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "FORK_DEADLINE_S", 0.1)  # the imports have taken longer
    supervisor = stage.supervisor("decode-0", worker_modules=(stage.module("import time; time.sleep(0.5)"),))
    async with running(supervisor, lambda _: None) as run:
        worker, [server] = stage.pid("decode-0"), stage.fork_servers()
        os.kill(server, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        await eventually(lambda: stage.pid("decode-0") != worker)
        assert "killing fork-server: no answer in 0.1 s" in stage.log.getvalue()
        assert Path(f"/proc/{stage.pid('decode-0')}/comm").read_text() != "decode-0\n", "it was not forked"
        await eventually(lambda: not is_alive(server))
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0


@pytest.mark.medium
async def test_a_fork_server_for_which_there_is_no_room_comes_back_when_there_is(stage: Stage) -> None:
    async with fork_server(stage) as server:
        await eventually(lambda: len(stage.fork_servers()) == 1)
        [first] = stage.fork_servers()
        with no_more_files():
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: "fork-server could not be started ([Errno 24]" in stage.log.getvalue())
        await eventually(lambda: len(stage.fork_servers() - {first}) == 1)
        child = await forked(server, stage, "")
        assert await asyncio.wait_for(child.ended(), DEADLINE_S) == 0


async def test_cycles_are_collected_in_workers_and_not_while_modules_are_imported(stage: Stage) -> None:
    async with fork_server(stage, "import gc; assert not gc.isenabled()") as server:
        child = await forked(server, stage, "import gc; assert gc.isenabled() and gc.get_freeze_count() > 1000")
        assert await asyncio.wait_for(child.ended(), DEADLINE_S) == 0, stage.log.getvalue()


async def test_a_fork_server_that_was_begun_early_is_taken_and_watched_like_any_other(stage: Stage) -> None:
    modules = (stage.module("print('imported')"),)
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        begun = early.begin(modules, stage.environ)
    server = ForkServer(modules, stage.environ, Console(stage.log, None), begun)
    await server.begin()
    child = await forked(server, stage, "import os; print(os.getppid())")
    assert await asyncio.wait_for(child.ended(), DEADLINE_S) == 0
    assert stage.fork_servers() == {begun.pid} and os.getsid(begun.pid) == begun.pid
    assert stage.log.getvalue().split() == ["imported", str(os.getpid())], "one has imported, and its output is shown"
    os.kill(begun.pid, signal.SIGKILL)
    await eventually(lambda: len(stage.fork_servers() - {begun.pid}) == 1)
    await server.end()
    assert not stage.fork_servers()


@pytest.mark.parametrize("wanted", [("json",), ()])
async def test_a_fork_server_of_other_modules_than_wanted_is_ended(wanted: tuple[str, ...], stage: Stage) -> None:
    begun = early.begin((stage.module(),), stage.environ)
    assert is_alive(begun.pid)
    server = ForkServer(wanted, stage.environ, Console(stage.log, None), begun)
    await server.begin()
    assert not is_alive(begun.pid) and begun.control.fileno() == -1
    child = await server.fork(ProcessSpec("decode-0", "json.tool", ("--help",), Kind.WORKER))
    assert (child is None) == (not wanted)
    if child is not None:
        assert await asyncio.wait_for(child.ended(), DEADLINE_S) == 0
    await server.end()
    assert stage.log.getvalue().startswith("usage:" if wanted else "")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_only_a_command_that_serves_begins_a_fork_server_early_and_with_what_workers_import(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(early, "begin", lambda modules, environ: asked.append(modules))
    monkeypatch.setattr(early, "GPU_FILE", "/dev/null" if has_gpu else "/dev/no_such_file")
    for words in (
        [],
        ["demo"],
        ["workers"],
        ["plan", "serve"],
        ["serve", "--help"],
        ["serve", "x", "--fork-server=off"],
    ):
        early.begin_early(words, {})
    assert asked == []
    early.begin_early(["serve", "x", "--port", "0"], {})
    assert asked == [(*(GPU_MODULES if has_gpu else ()), *WORKER_MODULES)]


@pytest.mark.medium
async def test_what_cannot_be_imported_is_shown_and_workers_start_without(stage: Stage) -> None:
    supervisor = stage.supervisor("decode-0", worker_modules=(stage.module("import nothing_of_that_name"),))
    async with running(supervisor, lambda _: None) as run:
        await eventually(lambda: "ended with exit code 1; workers import for themselves" in stage.log.getvalue())
        assert "No module named 'nothing_of_that_name'" in stage.log.getvalue()
        assert Path(f"/proc/{stage.pid('decode-0')}/comm").read_text() != "decode-0\n", "it was not forked"
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0


async def test_a_stop_does_not_wait_for_imports_and_starts_nobody_instead(stage: Stage) -> None:
    supervisor = stage.supervisor("decode-0", worker_modules=(stage.module("import time; time.sleep(1e6)"),))
    run = asyncio.create_task(supervisor.run(lambda _: None))
    await eventually(lambda: len(stage.fork_servers()) == 1)
    supervisor.stop()
    assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert not stage.fork_servers() and not (stage.directory / "decode-0.pid").exists()
    assert "decode-0" not in stage.log.getvalue()


async def test_nobody_of_a_worker_is_left_when_it_dies(stage: Stage) -> None:
    supervisor = stage.supervisor("parent", worker_modules=(stage.module(),))
    async with running(supervisor, lambda _: None) as run:
        child = Path(f"/proc/{(stage.directory / 'child').read_text()}")
        assert child.exists()
        os.kill(stage.pid("parent"), signal.SIGKILL)
        await eventually(lambda: not child.exists())
        supervisor.stop()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 11)", -11), ("raise ValueError('why')", 1), ("", 0)]
)
async def test_what_a_forked_process_is_given_says_and_ends_with(end: str, code: int, stage: Stage) -> None:
    async with fork_server(stage, "import os; CAP = os.environ.get('CAP')") as server:
        program = f"import os, sys, {stage.imported} as imported; print(imported.CAP, os.environ['CAP'], sys.argv[1:])"
        child = await forked(server, stage, f"{program}; assert not sys.stdin.read(); {end}", CAP="60")
        assert await asyncio.wait_for(child.ended(), DEADLINE_S) == code
        assert "None 60 ['flag']" in stage.log.getvalue()
        assert ("ValueError: why" in stage.log.getvalue()) == (code == 1)
        child.signal(signal.SIGKILL)  # it has ended, and nobody else gets it


async def test_a_forked_process_has_no_files_but_its_own(stage: Stage) -> None:
    async with fork_server(stage) as server:
        program = "import os, time; print(' '.join(sorted(os.listdir('/proc/self/fd')))); time.sleep(1e6)"
        children = [await forked(server, stage, program) for _ in range(2)]
        await eventually(lambda: stage.log.getvalue() == "0 1 2 3\n" * 2)  # and the listing
        for child in children:
            child.signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.ended(), DEADLINE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "trace"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=[100], daemon=True).start()", "2 threads"),
        ("kept = open('/dev/zero')", "file /dev/zero"),
        ("import subprocess; kept = subprocess.Popen(['sleep', '100'])", "a child process"),
    ],
)
async def test_no_worker_is_forked_where_more_has_happened_than_imports(code: str, trace: str, stage: Stage) -> None:
    async with fork_server(stage, code) as server:
        assert await server.fork(ProcessSpec("decode-0", "program", (), Kind.WORKER)) is None
        assert f"imports left {trace}: no worker can be forked" in stage.log.getvalue()


@pytest.mark.medium
@pytest.mark.parametrize("modules", [WORKER_MODULES, pytest.param(GPU_MODULES, marks=pytest.mark.gpu)])
async def test_imports_of_workers_leave_no_trace(modules: tuple[str, ...]) -> None:
    log = io.StringIO()
    server = ForkServer(modules, os.environ, Console(log, None))
    await server.begin()
    child = await server.fork(ProcessSpec("help", "prefill_worker", ("--help",), Kind.WORKER))
    code = None if child is None else await asyncio.wait_for(child.ended(), DEADLINE_S)
    await server.end()
    assert code == 0, log.getvalue()
    assert "Computes prompts" in log.getvalue()
