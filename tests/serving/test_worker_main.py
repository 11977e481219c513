"""How a worker process ends when something unexpected happens to it, or a setting is wrong."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.config import PREFILL_SECTIONS
from common.serving import worker_main
from common.wire.messages import Role
from prefill_worker.__main__ import build

ROOT = Path(__file__).parents[2]


class Broken:
    """A worker that fails, and then cannot even close."""

    def __init__(self) -> None:
        self.link: Any = self
        self.said: list[str] = []

    def run(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def farewell(self, reason: str) -> None:
        self.said.append(reason)

    def close(self) -> None:
        assert self.said, "the router is told first"
        raise RuntimeError("CUDA error: still")


def test_the_router_hears_of_an_unexpected_error_before_anything_else_can_go_wrong() -> None:
    worker = Broken()
    with pytest.raises(RuntimeError, match="still"):
        worker_main._run(worker)
    assert worker.said == [
        "it met an unexpected error: RuntimeError: CUDA error: an illegal memory access was encountered"
    ]


@pytest.mark.parametrize("argv", [("--prefill-lease-s", "0"), ("--kv-transport", "none"), ("--worker-device", "tpu")])
def test_a_worker_with_settings_that_serve_nothing_ends_with_2(
    argv: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefill_worker", *argv])
    assert worker_main.worker_main(Role.PREFILL, PREFILL_SECTIONS, "", build) == 2


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


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
