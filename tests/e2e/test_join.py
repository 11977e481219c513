"""Groups of workers that `baton join` runs: rolled one after the other under load, nothing is lost."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.operate.healthcheck import fetch
from tests.e2e.client import Completion, complete_all, prompts
from tests.support.nixl import secret_file
from tests.support.ports import ReservedPort

pytestmark = pytest.mark.medium

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
START_S = 90.0


class Groups:
    """A router, and groups of a worker of each role by name; use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._http, self._wire, self._directory = ReservedPort(), ReservedPort(), directory
        self.url = f"http://127.0.0.1:{self._http.number}"
        endpoint = f"--net-router-endpoint=tcp://127.0.0.1:{self._wire.number}"
        self._net = [endpoint, f"--net-secret-file={secret_file(directory)}"]
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Groups":
        self._start("router", "router", "--model-path", str(DEMO), "--router-port", str(self._http.number))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(60)
        self._http.close()
        self._wire.close()

    def join(self, name: str) -> None:
        """Start a group, and wait until the router has its workers."""
        told = ["--name", name, "--net-advertise=127.0.0.1", "--device=cpu", "--worker-num-threads=1"]
        self._start(name, "deploy", "join", str(DEMO), *told, "--prefill=1", "--decode=1")
        until_s = time.monotonic() + START_S
        while not {f"prefill-0-{name}", f"decode-0-{name}"} <= self.workers() or "ready:" not in self.log(name):
            assert time.monotonic() < until_s and self._running[name].poll() is None, self.log(name)
            time.sleep(0.2)

    def leave(self, name: str) -> int:
        """Have a group finish what it has, and return its exit status."""
        self._running[name].send_signal(signal.SIGTERM)
        return self._running.pop(name).wait(60)

    def workers(self) -> set[str]:
        try:
            health = fetch(self.url)
        except OSError:
            return set()
        return {each["id"] for role in health["workers"].values() for each in role}

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def _start(self, name: str, module: str, *words: str) -> None:
        with (self._directory / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", module, *words, *self._net]
            self._running[name] = subprocess.Popen(command, stderr=log, stdout=log, env=os.environ)


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    with Groups(tmp_path) as groups:
        yield groups


async def test_groups_rolled_under_load_lose_no_answer_and_change_none(groups: Groups) -> None:
    for name in ("a", "b"):
        await asyncio.to_thread(groups.join, name)
    asked = prompts(4, 5, 80, seed=33)
    expected = [each.text for each in await complete_all(groups.url, asked, max_tokens=48, ignore_eos=True)]
    over = asyncio.Event()
    rounds: list[list[Completion]] = []

    async def load() -> None:
        while not over.is_set():
            rounds.append(await complete_all(groups.url, asked, max_tokens=48, ignore_eos=True))

    loading = asyncio.create_task(load())
    for name in ("a", "b"):
        assert await asyncio.to_thread(groups.leave, name) == 0, groups.log(name)
        assert not any(each.endswith(f"-{name}") for each in groups.workers())
        await asyncio.to_thread(groups.join, name)
    over.set()
    await loading
    assert len(rounds) > 1
    for answers in rounds:
        assert [(each.error, each.text) for each in answers] == [(None, text) for text in expected]
