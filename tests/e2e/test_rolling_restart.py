"""Everything behind a router is drained and started again, one after the other, while texts are asked for."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.settings.config import NetSection
from deploy.operate.draining import drain, drain_all
from tests.e2e.client import Reference, complete, prompts
from tests.e2e.programs import Program
from tests.e2e.system import TIMEOUT_S, System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
MAX_TOKENS = 24


class Supervised(System):
    """Who ends is started again, as by whoever runs it."""

    async def keep_running(self) -> None:
        while True:
            for name in (*WORKERS, "memory"):
                process: Program = self.processes[name]
                if (status := process.poll()) is not None:
                    assert status == 0, self.log(name)
                    if name == "memory":
                        self.start_memory()
                    else:
                        self.start_worker(name)
            await asyncio.sleep(0.02)


async def test_a_rolling_restart_of_all_workers_and_their_memory_loses_nothing(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(8, 5, 80, seed=61)
    texts = [reference.text(prompt, MAX_TOKENS) for prompt in asked]
    num_answered, is_over = [0] * len(asked), False

    async def ask_on(index: int) -> None:
        async with aiohttp.ClientSession() as session:
            while not is_over:
                completion = await complete(session, system.url, asked[index], max_tokens=MAX_TOKENS)
                assert (completion.error, completion.text) == (None, texts[index])
                num_answered[index] += 1

    with Supervised(directory).start(prefill=2, decode=2) as system:
        net = NetSection(router_endpoint=system.router_endpoint[1])
        keeping = asyncio.create_task(system.keep_running())
        clients = [asyncio.create_task(ask_on(index)) for index in range(len(asked))]
        pids = {name: process.pid for name, process in system.processes.items()}
        for is_memory in (False, True):
            before, said = list(num_answered), list[str]()
            if is_memory:
                status = await asyncio.to_thread(drain, net, "memory", TIMEOUT_S, said.append, until_back=True)
            else:
                status = await asyncio.to_thread(drain_all, net, TIMEOUT_S, said.append)
                assert said[-1] == "4 workers were started again"
                assert all(system.processes[name].pid != pids[name] for name in WORKERS)
            assert status == 0, (said, system.logs())
            end_s = asyncio.get_running_loop().time() + TIMEOUT_S
            while any(count <= first for count, first in zip(num_answered, before, strict=True)):
                assert asyncio.get_running_loop().time() < end_s, system.logs()
                assert not keeping.done() and not any(client.done() for client in clients)
                await asyncio.sleep(0.02)
        is_over = True
        await asyncio.gather(*clients)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(system.wait_ready, 2, 2)


async def test_a_drain_ends_in_words_for_what_cannot_be(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint("qwen3-tied")
    said: list[str] = []
    with System(directory).start() as system:
        net = NetSection(router_endpoint=system.router_endpoint[1])
        assert await asyncio.to_thread(drain, net, "decode-7", 5.0, said.append) == 1
        assert "no worker or memory server 'decode-7'" in said[-1]
        assert await asyncio.to_thread(drain, net, "decode-0", 60.0, said.append) == 0
        assert said[-1].startswith("decode-0 has left after")
        system.until(lambda: system.processes["decode-0"].poll() == 0)
        system.processes.pop("decode-0")
        assert await asyncio.to_thread(drain, net, "memory", 2.0, said.append, until_back=True) == 1
        assert said[-1].startswith("memory is not back after 2 s")
        system.processes.clear()
