"""Workers of `baton serve` change roles under a load whose mix flips: no answer is lost or another, whoever dies."""

import asyncio
import io
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from common.settings.config import Config, DecodeSection, ModelSection, NetSection, PrefillSection, WorkerSection
from common.settings.memory_sections import KVSection
from deploy.autoscale.judge import Pace
from deploy.autoscale.options import AutoscaleOptions
from deploy.operate.health import local_url
from deploy.processes.console import Console
from deploy.processes.supervisor import Supervisor
from deploy.serve.command import Fleet, prepared, with_port
from tests.e2e.client import Reference, complete, prompts

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
TIMEOUT_S = 120.0
LONG_REPLY = 40


@dataclass
class Served:
    """What runs, its log, and its end."""

    supervisor: Supervisor
    log: io.StringIO
    url: str
    run: "asyncio.Task[int]"

    async def until(self, condition: Callable[[], bool]) -> None:
        end_s = asyncio.get_running_loop().time() + TIMEOUT_S
        while not condition():
            assert asyncio.get_running_loop().time() < end_s, self.log.getvalue()
            assert not self.run.done(), self.log.getvalue()
            await asyncio.sleep(0.02)

    def changes(self, what: str = "is in the place of") -> list[str]:
        return [line for line in self.log.getvalue().splitlines() if "[baton]" in line and what in line]

    async def health(self) -> Any:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as response:
            return await response.json()


def config_of(model: Path, device: str, kv: KVSection) -> Config:
    """Small batches and steps, so that a few clients are a load."""
    return with_port(
        Config(
            model=ModelSection(path=str(model), name="m", dtype="float32"),
            net=NetSection(heartbeat_s=0.1, worker_timeout_s=60.0),
            worker=WorkerSection(device=device, num_threads=1),
            kv=kv,
            prefill=PrefillSection(max_batch_tokens=16),
            decode=DecodeSection(max_num_seqs=4),
        )
    )


@asynccontextmanager
async def served(config: Config, num_prefill: int, num_decode: int, gpus: str = "") -> AsyncIterator[Served]:
    """So many workers, until the end of the block."""
    options = AutoscaleOptions(Pace(window_s=0.4, cooldown_s=0.0))
    fleet = Fleet(num_prefill, num_decode, gpus, TIMEOUT_S, autoscale=options)
    log = io.StringIO()
    async with prepared(config, fleet, Console(log, None)) as (supervisor, _):
        run = asyncio.create_task(supervisor.run(lambda _: None))
        system = Served(supervisor, log, local_url("127.0.0.1", config.router.port), run)
        try:
            await system.until(supervisor.ready.is_set)
            yield system
        finally:
            while not run.done():
                supervisor.stop()
                await asyncio.sleep(0.05)


class Clients:
    """Ask for the same again and again; each answer has to be what a single process says."""

    def __init__(self, url: str, asked: list[list[int]], texts: list[str], num_tokens: int) -> None:
        self.num_answers = 0
        self._url, self._num_tokens, self._is_over = url, num_tokens, False
        self._tasks = [asyncio.create_task(self._ask(*pair)) for pair in zip(asked, texts, strict=True)]

    async def _ask(self, prompt: list[int], text: str) -> None:
        async with aiohttp.ClientSession() as session:
            while not self._is_over:
                answer = await complete(session, self._url, prompt, max_tokens=self._num_tokens, ignore_eos=True)
                assert (answer.error, answer.text) == (None, text)
                self.num_answers += 1

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()


async def test_roles_follow_a_load_that_flips_and_nothing_is_lost(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference = Reference(directory, model)
    long_ones, short_ones = prompts(4, 180, 220, seed=3), prompts(4, 4, 8, seed=4)
    firsts = [reference.text(prompt, 1, ignore_eos=True) for prompt in long_ones] * 3
    replies = [reference.text(prompt, LONG_REPLY, ignore_eos=True) for prompt in short_ones] * 4
    long_ones, short_ones = long_ones * 3, short_ones * 4
    config = config_of(directory, "cpu", KVSection(prefix_cache=False, cpu_pool_bytes=16 << 20))
    async with served(config, 1, 2) as system:
        clients = Clients(system.url, long_ones, firsts, 1)
        await system.until(lambda: len(system.changes()) == 1)
        await clients.end()
        assert re.search(r"becomes prefill-1: over \d+ s ", system.changes("becomes")[0])
        roles = {role: len(workers) for role, workers in (await system.health())["workers"].items()}
        assert roles == {"prefill": 2, "decode": 1}

        clients = Clients(system.url, short_ones, replies, LONG_REPLY)
        await system.until(lambda: len(system.changes("becomes")) == 2)
        new = system.changes("becomes")[1].split(" becomes ")[1].split(":")[0]
        await system.until(
            lambda: new in system.supervisor.keeper.names and system.supervisor.keeper.pid(new) is not None
        )
        pid = system.supervisor.keeper.pid(new)
        assert new.startswith("decode-") and pid is not None
        os.kill(pid, signal.SIGKILL)  # in the middle of the change
        await system.until(lambda: len(system.changes()) == 2)
        await clients.end()
        health = await system.health()
        assert {each["id"]: each["pid"] for each in health["workers"]["decode"]}[new] != pid
        assert sum(map(len, health["workers"].values())) == 3
        assert [change["state"] for change in health["role_changes"]] == ["done", "done"]
        num_answers = clients.num_answers

        clients = Clients(system.url, long_ones, firsts, 1)
        await system.until(lambda: len(system.changes("becomes")) == 3)
        pids = [system.supervisor.keeper.pid(name) for name in system.supervisor.keeper.names]
        system.supervisor.stop()  # in the middle of another one
        assert await asyncio.wait_for(system.run, TIMEOUT_S) == 0, system.log.getvalue()
        clients.leave()
    assert num_answers >= len(short_ones)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids if pid is not None)
    assert not system.changes("a bug")


@pytest.mark.gpu
@pytest.mark.timeout(300)
async def test_on_gpus_a_prefill_worker_becomes_a_decode_worker(checkpoint: Checkpoint) -> None:
    """On two of them where nobody decodes yet; on one beside who does, as a decode worker more brings rows."""
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(4, 4, 8, seed=5)
    replies = [reference.text(prompt, LONG_REPLY, ignore_eos=True) for prompt in asked] * 4
    gpus = "0,1" if torch.cuda.device_count() > 1 else "0"
    config = config_of(directory, "cuda", KVSection(memory_fraction=0.3))
    async with served(config, 2, 1, gpus) as system:
        clients = Clients(system.url, asked * 4, replies, LONG_REPLY)
        await system.until(lambda: len(system.changes()) == 1)
        num_answers = clients.num_answers
        await system.until(lambda: clients.num_answers > num_answers + 32)
        await clients.end()
        old = "prefill-1 on cuda:1" if gpus == "0,1" else " on cuda:0"
        assert re.search(rf"{old} becomes decode-1: over \d+ s decode had", system.changes("becomes")[0])
        workers = (await system.health())["workers"]
        assert [len(workers[role]) for role in ("prefill", "decode")] == [1, 2]
        assert not system.changes("a bug") and not system.changes("killing")
