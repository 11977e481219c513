"""Prompts go where their beginnings are, by what memory servers tell: whatever was evicted, killed or started again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import TIMEOUT, prompts
from tests.e2e.slow_system import SlowSystem
from tests.e2e.system import System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
BLOCK, NUM_OUT = 16, 8
HOMES = {"prefill-1": "memory-1", "decode-1": "memory-1"}
FLAGS = ("--kv-prefix-min-tokens", "0")
BLOCK_BYTES = 3 * 2 * 16 * 2 * 32 * 4


def metric(system: System, name: str) -> int:
    lines = system.text("/metrics").splitlines()
    return int(float(next(line for line in lines if line.startswith(name + " ")).split()[1]))


def is_quiet(system: System) -> bool:
    """The router knows of all blocks that can be found, and nobody reads them."""
    servers = system.health()["memory_servers"]
    return system.all_blocks_free() and all(server["known_blocks"] == server["cached_blocks"] for server in servers)


async def ask(system: System, prompt: list[int]) -> tuple[int, int]:
    """Tokens that were found of it, and that were expected to be."""
    await asyncio.to_thread(system.until, lambda: is_quiet(system))
    before = metric(system, "baton_expected_cached_prompt_tokens_total")
    body = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_OUT, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(f"{system.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    expected = metric(system, "baton_expected_cached_prompt_tokens_total") - before
    return usage["prompt_tokens_details"]["cached_tokens"], expected


def full(num_tokens: int) -> int:
    """Tokens in full blocks of so many."""
    return num_tokens // BLOCK * BLOCK


async def test_what_is_expected_is_there_and_what_was_evicted_is_not_expected(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    asked = prompts(8, 80, 100, seed=41)
    with SlowSystem(directory, *FLAGS, "--kv-pool-bytes", str(16 * BLOCK_BYTES)).start(2, 2, homes=HOMES) as system:
        num_found = 0
        for prompt in [*asked, *asked[::-1], *asked]:  # two of them fit into each pool, or almost
            found, expected = await ask(system, prompt)
            assert found == expected
            num_found += found
        assert 4 * BLOCK < num_found < 12 * 80, "of 16 that were seen before the last ones are there"


async def test_what_is_left_in_host_memory_is_expected_where_it_is_and_comes_back(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    [first, *others] = prompts(7, 180, 200, seed=45)
    tier = ("--memory-host-tier-bytes", str(400 * BLOCK_BYTES))
    flags = (*FLAGS, "--kv-pool-bytes", str(20 * BLOCK_BYTES))

    def total(system: System, name: str) -> int:
        return sum(server[name] or 0 for server in system.health()["memory_servers"])

    with SlowSystem(directory, *flags, memory_flags=tier).start(2, 2, homes=HOMES) as system:
        assert await ask(system, first) == (0, 0)
        await asyncio.to_thread(system.until, lambda: total(system, "host_blocks") >= len(first) // BLOCK)
        for other in others:
            assert await ask(system, other) == (0, 0)
        await asyncio.to_thread(system.until, lambda: is_quiet(system))
        assert total(system, "known_host_blocks") >= 8, "of the first, at least, there is something nowhere else"
        num_there = full(len(first) - 1)
        assert await ask(system, first) == (num_there, num_there)
        await asyncio.to_thread(system.until, lambda: total(system, "restored_blocks") >= 8)


async def test_a_router_that_starts_again_knows_what_is_there(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    asked = prompts(6, 80, 100, seed=42)
    with SlowSystem(directory, *FLAGS).start(2, 2, homes=HOMES) as system:
        for prompt in asked:
            assert await ask(system, prompt) == (0, 0)
        known = [server["known_blocks"] for server in system.health()["memory_servers"]]
        assert min(known) >= 2 * (80 // BLOCK), "each pool has some of them"
        system.kill("router")
        system.start_router()
        system.wait_ready(2, 2)
        for prompt in asked:
            num_there = full(len(prompt) - 1)
            assert await ask(system, prompt) == (num_there, num_there)


async def test_what_a_killed_memory_server_had_is_not_expected_any_more(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    asked = prompts(6, 80, 100, seed=43)
    with SlowSystem(directory, *FLAGS).start(2, 2, homes=HOMES) as system:
        for prompt in asked:
            await ask(system, prompt)
        system.kill("memory-1")
        system.until(lambda: [server["id"] for server in system.health()["memory_servers"]] == ["memory"])
        system.until(lambda: len(system.health()["workers"]["prefill"]) == 1)
        results = [await ask(system, prompt) for prompt in asked]
        # Of what is in one pool only nothing is expected: there is nothing to choose.
        assert {expected for _, expected in results} == {0}
        for name in ("prefill-1", "decode-1"):
            system.processes.pop(name).wait(60.0)
        system.start_memory("memory-1")
        for name in ("prefill-1", "decode-1"):
            system.start_worker(name)
        system.wait_ready(2, 2)
        for prompt in asked:
            num_there = full(len(prompt) - 1)
            assert await ask(system, prompt) == (num_there, num_there), "it is in the pool that is left"


async def test_without_events_it_goes_by_what_was_sent_where(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    [prompt] = prompts(1, 80, 100, seed=44)
    with SlowSystem(directory, *FLAGS) as system:
        system.start_router(0, "--router-kv-events", "false")
        system.start_memory()
        system.homes = HOMES
        for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
            system.start_worker(name)
        system.wait_ready(2, 2)
        body = {"prompt": prompt, "max_tokens": 1}
        for _ in range(3):
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT) as session,
                session.post(f"{system.url}/v1/completions", json=body) as response,
            ):
                assert response.status == 200
        assert metric(system, "baton_expected_cached_prompt_tokens_total") == 2 * full(len(prompt) - 1)
        assert metric(system, "baton_cached_prompt_tokens_total") == 2 * full(len(prompt) - 1)
        assert {server["known_blocks"] for server in system.health()["memory_servers"]} == {None}
