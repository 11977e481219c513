"""The memory servers of a container, as processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.containers.memory_servers import specs
from deploy.operate.healthcheck import main as probe
from deploy.processes.placement import Gpu

ROOT = Path(__file__).parents[3]
DEADLINE_S = 100.0


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_there_is_one_for_each_gpu_or_one_for_the_cpu() -> None:
    named = {each.name: dict(zip(each.flags[::2], each.flags[1::2], strict=True)) for each in specs("/run/m", [], [])}
    assert named == {"memory": {"--memory-id": "memory", "--memory-device": "cpu", "--memory-socket": "/run/m/"}}
    two = specs("/run/m/", [Gpu(0, 0), Gpu(3, 0)], ["--log-level", "DEBUG"])
    assert [each.name for each in two] == ["memory-0", "memory-3"]
    assert {each.flags[-2:] for each in two} == {("--log-level", "DEBUG")}
    assert "/run/m/" in two[0].flags


@pytest.mark.medium
def test_one_that_dies_is_started_again_and_a_signal_ends_them_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.containers.memory_servers", str(tmp_path), "--net-router-endpoint",
               f"ipc://{tmp_path}/router"]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as launcher:
        until(lambda: probe([f"{tmp_path}/"]) == 0)
        server = int(subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout)
        os.kill(server, signal.SIGKILL)
        until(lambda: probe([f"{tmp_path}/"]) == 1)
        until(lambda: probe([f"{tmp_path}/"]) == 0)
        launcher.terminate()
        assert launcher.wait(DEADLINE_S) == 0
        assert launcher.stderr is not None
        assert "memory ended with signal SIGKILL; again in 0 s" in launcher.stderr.read()
    assert probe([f"{tmp_path}/"]) == 1, "nobody is left"


def test_settings_that_are_wrong_end_it(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "deploy.containers.memory_servers",
        str(tmp_path),
        "--net-router-endpoint",
        "tcp://h:1",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert "net.secret_file" in ended.stderr
