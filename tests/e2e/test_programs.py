"""Forked programs are processes like those that are executed: they say, end and are ended the same way."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import ForkServer, Launch, Program, executed, forked

pytestmark = pytest.mark.medium

LIMIT_S = 60.0
MODULE = "common.memory"


@pytest.fixture(params=[executed, forked])
def launch(request: pytest.FixtureRequest) -> Launch:
    chosen: Launch = request.param
    return chosen


@pytest.fixture
def running(launch: Launch, tmp_path: Path) -> Iterator[Program]:
    program = started(launch, tmp_path)
    yield program
    program.kill()
    program.wait(LIMIT_S)


def started(launch: Launch, directory: Path) -> Program:
    """A memory server that serves."""
    output, ready = directory / "output", threading.Event()
    with output.open("wb") as file:
        flags = ["--memory-device", "cpu", "--memory-socket", str(directory / "socket")]
        program = launch(MODULE, flags, file)
    for _ in range(round(LIMIT_S / 0.02)):
        if "owning memory of cpu" in output.read_text():
            return program
        assert program.poll() is None, output.read_text()
        ready.wait(0.02)
    raise AssertionError("it does not serve")


def test_what_it_says_and_how_it_ends(launch: Launch, tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        program = launch(MODULE, ["--memory-device", "nowhere"], output)
    assert program.wait(LIMIT_S) == program.wait(0.0) == program.poll() == 2
    assert "python -m common.memory: memory.device" in (tmp_path / "output").read_text()
    program.kill()  # it has ended, and nobody else gets it


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_a_signal_ends_it(number: signal.Signals, status: int, running: Program) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.0)
    running.send_signal(number)
    assert running.wait(LIMIT_S) == status == running.poll()
    assert not Path(f"/proc/{running.pid}").exists()


def test_it_stands_still_and_goes_on(running: Program) -> None:
    running.send_signal(signal.SIGSTOP)
    running.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.1)
    running.send_signal(signal.SIGCONT)
    assert running.wait(LIMIT_S) == 0


def test_all_who_wait_for_it_hear_of_its_end(running: Program) -> None:
    heard: list[int] = []
    waiting = [threading.Thread(target=lambda: heard.append(running.wait(LIMIT_S))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    running.kill()
    for thread in waiting:
        thread.join(LIMIT_S)
    assert heard == [-signal.SIGKILL] * 3


def test_a_forked_program_has_the_files_of_an_executed_one_and_outlives_the_fork_server(tmp_path: Path) -> None:
    fork_server, files = ForkServer(), []
    for name, launch in (("executed", executed), ("forked", fork_server.start)):
        (tmp_path / name).mkdir()
        program = started(launch, tmp_path / name)
        files.append(len(list(Path(f"/proc/{program.pid}/fd").iterdir())))
        if launch is not executed:
            fork_server.close()
        program.terminate()
        assert program.wait(LIMIT_S) == 0
    assert files[0] == files[1]
