"""`baton serve`, whoever reads what it prints, and whoever removes its sockets."""

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.settings.config import Config, ModelSection, WorkerSection
from common.settings.memory_sections import KVSection
from deploy.processes.console import Console
from deploy.processes.launch_plan import SOURCE_ROOT
from deploy.processes.mps import Mps, MpsOptions
from deploy.processes.placement import SERVER_BYTES, Gpu
from deploy.serve import command
from deploy.serve.command import Fleet, end_without, prepared, ready_text
from deploy.serve.demo import DEMO_MODEL
from tests.support.ports import ReservedPort
from tests.support.stand_ins import DEADLINE_S, Stage, eventually, running


def _decode_pids(url: str) -> list[int]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return [worker["pid"] for worker in json.load(response)["workers"]["decode"]]
    except (urllib.error.URLError, ConnectionError):
        return []


def _full_pipe() -> tuple[int, int]:
    """A pipe with room for not one byte more; whoever writes waits."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(write, bytes(size))
        except BlockingIOError:
            continue
    os.set_blocking(write, True)
    return read, write


@pytest.mark.slow
async def test_output_that_nobody_reads_stops_neither_restarts_nor_signals() -> None:
    with ReservedPort() as port:
        url, (read, write) = f"http://127.0.0.1:{port.number}", _full_pipe()
        command = [sys.executable, "-m", "deploy", "serve", "deploy/demo_model", "--device", "cpu",
                   "--kv-transport", "none", "--port", str(port.number)]  # fmt: skip
        with subprocess.Popen(command, cwd=SOURCE_ROOT, stdout=write, stderr=write) as serve:
            os.close(write)
            try:
                await eventually(lambda: bool(_decode_pids(url)))
                [first] = _decode_pids(url)
                os.kill(first, signal.SIGKILL)
                await eventually(lambda: _decode_pids(url) not in ([], [first]))
                serve.terminate()
                assert serve.wait(DEADLINE_S) == 0
            finally:
                serve.kill()
                os.close(read)


@pytest.mark.medium
async def test_who_removes_the_sockets_of_a_system_ends_it(tmp_path: Path) -> None:
    stage, runtime_dir = Stage(tmp_path), tmp_path / "sockets"
    runtime_dir.mkdir()
    with stage.reserved:
        supervisor = stage.supervisor("decode-0")
        supervisor.add_companion(partial(end_without, runtime_dir, supervisor))
        async with running(supervisor, lambda _: None) as run:
            shutil.rmtree(runtime_dir)
            assert await asyncio.wait_for(run, DEADLINE_S) == 1
    assert stage.notes() == ["router left", "decode-0 left"], "in order"
    assert f"{runtime_dir} was removed" in stage.log.getvalue()


async def test_a_gpu_too_small_for_16_bits_takes_the_weights_in_8(monkeypatch: pytest.MonkeyPatch) -> None:
    fraction, between_bytes = KVSection().memory_fraction, 5_500_000
    gpu = Gpu(0, round((SERVER_BYTES + between_bytes) / (0.9 * fraction)))
    monkeypatch.setattr("deploy.serve.command.detect_gpus", lambda environ: [gpu])
    fleet, console = Fleet(1, 1, "", 10.0, mps=MpsOptions("off")), Console(io.StringIO(), None)
    config = Config(model=ModelSection(path=str(DEMO_MODEL)))
    with pytest.raises(ConfigError, match="weights do not leave room"):
        async with prepared(config, fleet, console):
            pass
    async with prepared(replace(config, model=replace(config.model, quantization="fp8")), fleet, console) as (_, mps):
        assert not mps.flags


@pytest.mark.medium
async def test_imports_begin_before_mps_starts_and_end_with_what_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(tmp_path)

    @asynccontextmanager
    async def broken(*_: object) -> AsyncIterator[Mps]:
        await eventually(lambda: bool(stage.fork_servers()))
        raise ConfigError("no MPS")
        yield  # as what is replaced does

    monkeypatch.setattr(command, "open_mps", broken)
    monkeypatch.setattr(command, "modules_of", lambda _: (stage.module("import time; time.sleep(1e6)"),))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = replace(Config(), model=ModelSection(path=str(DEMO_MODEL)), worker=WorkerSection(device="cpu"))
    with stage.reserved, pytest.raises(ConfigError, match="no MPS"):
        async with prepared(config, Fleet(1, 1, "", 10.0), Console(stage.log, None)):
            pass
    assert not stage.fork_servers()


def test_what_is_said_of_a_ready_system_tells_where_prompts_are_computed() -> None:
    config = Config(model=ModelSection(path=str(DEMO_MODEL)))
    workers = {"prefill": [], "decode": [{"standby": None}]}
    health: JsonObject = {"status": "ok", "problems": [], "workers": workers, "kv_paths": []}
    assert "0 prefill + 1 decode  prompts in decode workers\n" in ready_text(config, health, Mps())
    path = {"transport": "nixl tcp", "gb_per_s": 2.0, "error": ""}
    assert "KV over nixl tcp at 2.0 GB/s\n" in ready_text(config, health | {"kv_paths": [path]}, Mps())
