"""How a worker process ends when something unexpected happens to it, or a setting is wrong."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.base.errors import MemoryLost
from common.base.log import StartLog
from common.serving.worker import start
from common.serving.worker.drain import Drain
from common.settings.config import Config
from common.wire.messages.worker import Role
from prefill_worker.__main__ import build

ROOT = Path(__file__).parents[3]


ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"


class Broken:
    """A worker that fails, and then cannot even close; and the memory server that it is connected to."""

    def __init__(self) -> None:
        self.link: Any = self
        self.said: list[str] = []
        self.peers = SimpleNamespace(report_fault=lambda it: self.said.append(f"to other memory servers: {it}"))

    def run(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def farewell(self, reason: str) -> None:
        self.said.append(reason)

    def report_fault(self, problem: str) -> None:
        self.said.append(f"to the memory server: {problem}")

    def close(self) -> None:
        assert self.said, "the router is told first"
        raise RuntimeError("CUDA error: still")


def test_the_router_hears_of_an_unexpected_error_before_anything_else_can_go_wrong() -> None:
    worker: Any = Broken()
    with pytest.raises(RuntimeError, match="still"):
        start._run(worker, worker)
    assert worker.said == [f"it met an unexpected error: {ERROR}"]


@pytest.mark.parametrize("lost", [False, True], ids=["", "nor the memory server"])
def test_of_a_fault_of_the_device_the_memory_server_hears_before_the_router_sends_requests_to_others(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = Broken()
    monkeypatch.setattr(start, "device_fault", lambda: "illegal access")
    if lost:
        monkeypatch.setattr(worker, "report_fault", _lose)
    with pytest.raises(RuntimeError, match="still"):
        start._run(worker, worker)
    told = [] if lost else ["to the memory server: illegal access"]
    assert worker.said == [
        *told,
        "to other memory servers: illegal access",
        f"its device met a fault: illegal access: {ERROR}",
    ]


def test_what_goes_wrong_while_a_worker_is_built_may_be_a_fault_too(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = Broken()
    faults = iter(["illegal access", ""])
    monkeypatch.setattr(start, "device_fault", lambda: next(faults))
    incarnation = start.Incarnation("decode-0", 1, Drain(1.0), memory, StartLog())

    def broken(config: Config, incarnation: start.Incarnation) -> start.WorkerLoop:
        raise RuntimeError("while capturing")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="while capturing"):
            start._built(broken, Config(), incarnation)
    assert memory.said == ["to the memory server: illegal access"], "the other error was none"


def _lose(problem: str) -> None:
    raise MemoryLost("it closed the connection")


@pytest.mark.parametrize(
    "argv",
    [
        ("--prefill-max-num-seqs", "0"),
        ("--kv-transport", "none"),
        ("--kv-prefill-sharers", "0"),
        ("--worker-device", "tpu"),
        ("--model-path", "/no/such/model"),
        ("--net-router-endpoint", "tcp://router:5570"),
    ],
)
def test_a_worker_with_settings_that_serve_nothing_ends_with_2(
    argv: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefill_worker", *argv])
    assert start.worker_main(Role.PREFILL, "", build) == 2


def test_a_signal_after_the_error_of_a_start_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor ends all others when one fails, and they may be ending by themselves."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(sys, "argv", ["prefill_worker", "--model-path", "/no/such/model"])
    try:
        assert start.worker_main(Role.PREFILL, "", build) == 2
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (0o600, r"5 bytes; at least 32: make one with"),
        (0o000, r"this process's user, \d+, may not read it"),
        (None, "No such file"),
    ],
)
def test_a_worker_without_a_secret_that_it_can_use_says_so_before_it_waits_for_anybody(
    mode: int | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody is at that socket."""
    secret = tmp_path / "secret"
    if mode is not None:
        secret.write_text("short")
        secret.chmod(mode)
    if mode == 0o000 and os.getuid() == 0:  # who may read everything
        opened = os.open

        def open_another(path: Any, *args: Any, **options: Any) -> int:
            return _forbidden(secret) if path in (secret, str(secret)) else opened(path, *args, **options)

        monkeypatch.setattr(os, "open", open_another)
    argv = ["--net-router-endpoint", "tcp://127.0.0.1:9", "--net-secret-file", str(secret),
            "--worker-memory-socket", str(tmp_path / "nobody.sock")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["prefill_worker", *argv])
    assert start.worker_main(Role.PREFILL, "", build) == 2
    logging.getLogger().handlers[0].flush()
    assert re.search(problem, capfd.readouterr().err)


def _forbidden(path: Path) -> int:
    raise PermissionError(path)


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.medium
def test_a_worker_that_still_starts_ends_with_the_first_signal(tmp_path: Path) -> None:
    """Here it waits a minute for a memory server."""
    command = [sys.executable, "-m", "prefill_worker", "--model-path", "deploy/demo_model", "--worker-device", "cpu",
               "--worker-memory-socket", str(tmp_path / "nobody.sock")]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not catches(process.pid, signal.SIGTERM):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 0
        assert "stopping before the start is complete" in process.stderr.read()
