"""Memory servers that workers start: one for all who come, and none when nobody does."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from common.base.errors import ConfigError, MemoryLost
from common.memory.client import starter as starter_module
from common.memory.client.client import MemoryClient
from common.memory.client.starter import Starter
from common.serving.worker import start
from common.settings.config import Config, NetSection, WorkerSection
from common.settings.memory_sections import MemorySection
from common.wire.messages.worker import Role
from common.wire.transport import endpoints

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0


class Workers:
    """Find a server at one path, or start it; it serves nobody for a second."""

    def __init__(self, path: Path, net: NetSection) -> None:
        self.path, self.config = path, Config(net=net, memory=MemorySection(linger_s=1.0))
        self.starters: list[Starter] = []
        self.clients: list[MemoryClient] = []

    def come(self, name: str) -> MemoryClient:
        starter = Starter(self.path, self.config, "cpu")
        self.starters.append(starter)
        client = MemoryClient(self.path, name, 1, is_decoding=False, summon=starter)
        self.clients.append(client)
        return client

    def leave(self) -> None:
        while self.clients:
            self.clients.pop().close()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [starter.process for starter in self.starters if starter.process is not None]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    some = Workers(tmp_path / "memory.sock", NetSection(router_endpoint=f"ipc://{tmp_path}/router"))
    yield some
    some.leave()
    for process in some.processes():
        process.kill()


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "not within the deadline"
        time.sleep(0.01)


@pytest.mark.medium
def test_workers_that_come_at_once_find_one_server_and_it_ends_after_they_have_left(workers: Workers) -> None:
    with ThreadPoolExecutor(4) as threads:
        clients = list(threads.map(workers.come, [f"prefill-{i}" for i in range(4)]))
    assert len({(client.server_id, client.server_epoch) for client in clients}) == 1
    assert workers.come("late").server_epoch == clients[0].server_epoch
    started = workers.processes()
    eventually(lambda: sum(process.poll() is None for process in started) == 1)
    [serving] = [process for process in started if process.poll() is None]
    assert os.getsid(serving.pid) == serving.pid, "what ends a worker's session does not end it"
    workers.leave()
    eventually(lambda: serving.poll() is not None)
    assert {process.returncode for process in started} == {0}
    assert not workers.path.exists()
    assert workers.come("next").server_epoch != clients[0].server_epoch


@pytest.mark.medium
def test_what_a_killed_server_left_is_taken_over(workers: Workers) -> None:
    first = workers.come("prefill-0")
    eventually(lambda: len(workers.processes()) == 1)
    [process] = workers.processes()
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: process.poll() is not None)
    assert workers.path.exists()
    assert workers.come("prefill-1").server_epoch != first.server_epoch


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "memory.sock", NetSection(router_endpoint="tcp://127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"ended with status 2: .*set net\.secret_file.*memory\.log"):
        workers.come("prefill-0")
    workers = Workers(tmp_path / "gone" / "memory.sock", NetSection())
    with pytest.raises(ConfigError, match=r"no memory server can be started: .*No such file or directory.*gone"):
        workers.come("prefill-0")


def test_it_reaches_the_router_as_its_worker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has another working directory."""
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text(secrets.token_hex(32))
    Path("secret").chmod(0o600)
    workers = Workers(tmp_path / "memory.sock", NetSection(router_endpoint="tcp://127.0.0.1:1", secret_file="secret"))
    workers.come("prefill-0")
    workers.leave()
    net = NetSection(router_endpoint="ipc://router.sock")
    assert Starter(workers.path, Config(net=net), "cpu").config.net.router_endpoint == f"ipc://{tmp_path}/router.sock"


@pytest.mark.medium
def test_a_log_that_has_become_long_begins_again(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    log = workers.path.with_suffix(".log")
    log.write_text("before\n")
    workers.come("prefill-0")
    workers.leave()
    assert log.read_text().startswith("before\n")
    monkeypatch.setattr(starter_module, "MAX_LOG_BYTES", 4)
    eventually(lambda: not workers.path.exists())
    workers.come("prefill-0")
    assert not log.read_text().startswith("before\n")


@pytest.mark.medium
@pytest.mark.parametrize(("linger_s", "status"), [("60", 0), ("0", 2)])
def test_a_second_server_of_a_socket_ends_and_that_is_wrong_for_one_that_was_to_stay(
    workers: Workers, linger_s: str, status: int
) -> None:
    workers.come("prefill-0")
    command = [sys.executable, "-m", "common.memory", "--memory-socket", str(workers.path),
               "--memory-linger-s", linger_s,
               "--net-router-endpoint", f"ipc://{workers.path.parent}/nobody.sock"]  # fmt: skip
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode == status
    assert "is another memory server's" in second.stderr
    assert workers.come("prefill-1").server_epoch == workers.clients[0].server_epoch


def test_a_worker_that_meets_a_server_about_to_end_asks_once_more(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def connect(path: Path, *args: object, **more: object) -> MemoryClient:
        asked.append(str(path))
        if len(asked) == 1:
            raise MemoryLost("it closed the connection")
        return workers.come("prefill-0")

    monkeypatch.setattr(start, "MemoryClient", connect)
    monkeypatch.setattr(start, "memory_socket", lambda *_: workers.path)
    config = replace(workers.config, worker=replace(workers.config.worker, device="cpu"))
    assert start._memory(config, Role.PREFILL, "prefill-0", 1) is workers.clients[0]
    assert len(asked) == 2


@pytest.mark.medium
def test_workers_of_two_routers_have_two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tells its router of deaths, and what befalls one does not befall the other."""
    monkeypatch.setattr(endpoints, "PARENT", tmp_path)
    monkeypatch.chdir(tmp_path)
    config = replace(Config(memory=MemorySection(linger_s=1.0)), worker=WorkerSection(device="cpu"))
    routers = ("ipc://one", "ipc://two", f"ipc://{tmp_path}/one", "auto")
    clients = [
        start._memory(replace(config, net=NetSection(router_endpoint=router)), Role.PREFILL, f"prefill-{i}", 1)
        for i, router in enumerate(routers)
    ]
    one, two, one_too, nobodys = (client.server_epoch for client in clients)
    assert one == one_too and len({one, two, nobodys}) == 3
    for client in clients:
        client.close()
    directory = endpoints.private_directory()
    eventually(lambda: not list(directory.glob("memory-*.sock")))
