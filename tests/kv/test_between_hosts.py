"""Pulls from another host that dies, stops or vanishes meanwhile: all bytes or an error, and no byte afterwards."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.memory.client.client import MemoryClient
from common.wire.messages.frames import encode
from tests.kv.peer_process import LAYOUT
from tests.support.hosts import Hosts, needs_hosts
from tests.support.messages import pool_export
from tests.support.nixl import gate_flags, secret_file

pytestmark = [pytest.mark.medium, needs_hosts()]

ROOT = Path(__file__).parents[2]
NUM_BLOCKS = 640  # 15 MB
NUM_PULLED = 600
MBIT_PER_S = 40
"""A pull lasts for 3 s."""
TIMEOUT_S = 0.5
"""`net.worker_timeout_s` of the reader and the gate."""
LATE_S = 1.5
"""In which late bytes would arrive."""
WAIT_S = 60.0
NUM_ROUNDS, NUM_SMALL = 16, 500


class Process:
    """A program on a host, told what to do line by line."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Lenders:
    """A memory server with a gate and a full pool on host a; readers on host b, of the pool or of staging."""

    def __init__(self, hosts: Hosts, way: str) -> None:
        self.hosts, self.way = hosts, way
        self.directory = tempfile.TemporaryDirectory(prefix="baton-")
        self.here = Path(self.directory.name)
        self.socket = self.here / "memory.sock"
        self.processes: list[Process] = []
        flags = [
            "--memory-socket", str(self.socket), "--net-router-endpoint", f"ipc://{self.here}/router",
            "--net-worker-timeout-s", str(TIMEOUT_S), "--net-heartbeat-s", str(TIMEOUT_S / 4),
        ]  # fmt: skip
        self.server = self.started("a", "common.memory", *flags, *gate_flags(self.here, hosts.addresses["a"]))
        self.writer = self.started("a", "tests.kv.peer_process", str(self.socket), "cpu", str(NUM_BLOCKS))
        self.pool_id = int(self.writer.hear())
        self.writer.tell("fill 1")
        client = MemoryClient(self.socket, "asker", 1, is_decoding=False)
        self.gate_endpoint = client.gate
        client.close()

    def started(self, host: str, module: str, *args: str) -> Process:
        self.processes.append(Process(self.hosts.command(host, [sys.executable, "-m", module, *args])))
        return self.processes[-1]

    def reader(self) -> tuple[Process, str]:
        """Return a reader on host b, and what it says of its path."""
        export = pool_export(
            "p", transport="nixl", layout=LAYOUT, pool_id=self.pool_id, gate=self.gate_endpoint,
            memory_socket=str(self.here / "unreachable"),
        )  # fmt: skip
        secret = str(secret_file(self.here))
        reader = self.started(
            "b", "tests.kv.reader_process", encode(export).hex(), secret, str(TIMEOUT_S), str(NUM_BLOCKS), self.way
        )
        return reader, reader.hear()

    def gate(self) -> int:
        """Return the process id of the gate."""
        return next(iter(children(self.server.process.pid)))

    def lenders(self) -> list[int]:
        return children(self.gate())

    def pids(self, name: str) -> list[int]:
        """Return the process ids of the server, the gate or the lenders."""
        if name == "server":
            return [self.server.process.pid]
        return [self.gate()] if name == "gate" else self.lenders()

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
        self.directory.cleanup()


def children(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in words]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts("a", "b") as hosts:
        yield hosts


@pytest.fixture(params=["direct", "staged"])
def lenders(request: pytest.FixtureRequest, hosts: Hosts) -> Iterator[Lenders]:
    lenders = Lenders(hosts, request.param)
    yield lenders
    lenders.close()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def signalled(number: signal.Signals, *who: str) -> Callable[[Lenders], None]:
    """Return a fault that sends a signal to processes of the source."""

    def fault(lenders: Lenders) -> None:
        pids = [pid for name in who for pid in lenders.pids(name)]  # before the first ends the others
        for pid in pids:
            os.kill(pid, number)

    return fault


FAULTS: dict[str, Callable[[Lenders], None]] = {
    "lender dies": signalled(signal.SIGKILL, "lender"),
    "gate dies": signalled(signal.SIGKILL, "gate"),
    "host dies": signalled(signal.SIGKILL, "lender", "gate", "server"),
    "lender stops": signalled(signal.SIGSTOP, "lender"),
    "gate stops": signalled(signal.SIGSTOP, "gate"),
    "host stops": signalled(signal.SIGSTOP, "lender", "gate", "server"),
    "link is cut": lambda lenders: lenders.hosts.cut("a"),
}
RECOVERIES: dict[str, Callable[[Lenders], None]] = {
    "lender stops": signalled(signal.SIGCONT, "lender"),
    "gate stops": signalled(signal.SIGCONT, "gate"),
    "host stops": signalled(signal.SIGCONT, "lender", "gate", "server"),
    "link is cut": lambda lenders: lenders.hosts.mend("a"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pull_amid_a_fault_fails_and_not_a_byte_comes_afterwards(fault: str, lenders: Lenders) -> None:
    hosts = lenders.hosts
    reader, path = lenders.reader()
    assert path.endswith("nixl tcp"), path
    hosts.slow("a", MBIT_PER_S)
    try:
        reader.tell(f"pull {NUM_PULLED}")
        time.sleep(0.5)
        FAULTS[fault](lenders)
        assert reader.tell("end").startswith("failed: pool of worker p")
    finally:
        RECOVERIES.get(fault, signalled(signal.SIGCONT))(lenders)
        hosts.free("a")
    time.sleep(LATE_S)
    assert reader.tell("late") == "0"
    if fault != "host dies":
        until(lambda: not reader.tell("prove").startswith("failed"))
        reader.tell(f"pull {NUM_PULLED}")
        assert (reader.tell("end"), reader.tell(f"equal 1 {NUM_PULLED}")) == ("done", "True")
        until(lambda: len(lenders.lenders()) == 1)


def test_a_reader_that_dies_amid_a_pull_leaves_no_claim_and_no_lender(lenders: Lenders) -> None:
    reader, _ = lenders.reader()
    lenders.hosts.slow("a", MBIT_PER_S)
    try:
        reader.tell(f"pull {NUM_PULLED}")
        time.sleep(0.5)
        reader.kill()
        until(lambda: not lenders.lenders())
    finally:
        lenders.hosts.free("a")
    another, path = lenders.reader()
    assert path.endswith("nixl tcp"), path
    another.tell(f"pull {NUM_PULLED}")
    assert (another.tell("end"), another.tell(f"equal 1 {NUM_PULLED}")) == ("done", "True")


@pytest.mark.slow
def test_whatever_happens_when_pulls_are_whole_or_void(lenders: Lenders) -> None:
    rng = random.Random(1)
    reader, _ = lenders.reader()
    faults = [name for name in FAULTS if name != "host dies"]
    num_failed = 0
    for _ in range(NUM_ROUNDS):
        fault, count = rng.choice([*faults, ""]), rng.randint(300, NUM_PULLED)
        lenders.hosts.slow("a", 200)
        reader.tell(f"pull {count}")
        time.sleep(rng.uniform(0.0, 0.4))
        if fault:
            FAULTS[fault](lenders)
        outcome = reader.tell("end")
        RECOVERIES.get(fault, signalled(signal.SIGCONT))(lenders)
        lenders.hosts.free("a")
        if outcome == "done":
            assert reader.tell(f"equal 1 {count}") == "True"
        else:
            num_failed += 1
            time.sleep(0.5)
            assert reader.tell("late") == "0"
        until(lambda: not reader.tell("prove").startswith("failed"))
    assert 0 < num_failed < NUM_ROUNDS
    assert reader.tell(f"many {NUM_SMALL} 1") == "right"


def test_lost_packets_cost_time_only(lenders: Lenders) -> None:
    reader, _ = lenders.reader()
    lenders.hosts.lose("a")
    try:
        for seed in (2, 3):
            lenders.writer.tell(f"fill {seed}")
            reader.tell("pull 100")
            assert (reader.tell("end"), reader.tell(f"equal {seed} 100")) == ("done", "True")
        assert lenders.hosts.num_lost("a")
    finally:
        lenders.hosts.free("a")
