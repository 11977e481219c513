"""What a tiny pool has no room for comes back from host memory, and every text stays what it was."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.slow_system import SlowSystem
from tests.e2e.system import System
from tests.e2e.test_prefixes import ANY_LENGTH, NUM_OUT, ask, full, metric

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
BLOCK_BYTES = 3 * 2 * 16 * 2 * 32 * 4
TIER = ("--memory-host-tier-bytes", str(400 * BLOCK_BYTES))


def tiny(num_blocks: int) -> tuple[str, ...]:
    """A pool of so many blocks."""
    return (*ANY_LENGTH, "--kv-pool-bytes", str(num_blocks * BLOCK_BYTES))


def tier(system: System, name: str = "memory") -> dict[str, int]:
    """What the memory server of that name says of its tier."""
    [server] = [server for server in system.health()["memory_servers"] if server["id"] == name]
    return {key: server[key] or 0 for key in ("host_blocks", "restored_blocks")}


async def crowd_out(system: System, reference: Reference, others: list[list[int]], num_kept: int) -> None:
    """Other prompts come, when so many blocks of those before are in host memory."""
    await asyncio.to_thread(system.until, lambda: tier(system)["host_blocks"] >= num_kept)
    for prompt in others:
        assert (await ask(system, prompt)).texts == [reference.text(prompt, NUM_OUT, ignore_eos=True)]


async def test_what_was_pushed_out_is_restored_and_says_the_same(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [first, *others] = Reference(directory, model), prompts(4, 180, 200, seed=31)
    with SlowSystem(directory, *tiny(20), memory_flags=TIER).start() as system:
        assert "400 KV blocks" in system.log("memory") and "times the pool" in system.log("memory")
        cold = await ask(system, first, cache_salt="ours")
        assert cold.num_cached == 0
        await crowd_out(system, reference, others[:2], len(first) // 16)
        assert (await ask(system, first, cache_salt="theirs")).num_cached == 0, "nobody else's"
        await crowd_out(system, reference, others[2:], 0)
        warm = await ask(system, first, cache_salt="ours")
        assert (warm.num_cached, warm.texts) == (full(len(first) - 1), cold.texts)
        assert cold.texts == [reference.text(first, NUM_OUT, ignore_eos=True)]
        system.until(lambda: tier(system)["restored_blocks"] >= full(len(first) - 1) // 16)
        system.until(system.all_blocks_free)


async def test_equal_prompts_that_come_together_wait_for_one_restore(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [first, *others] = Reference(directory, model), prompts(4, 180, 200, seed=32)
    with SlowSystem(directory, *tiny(30), memory_flags=TIER).start() as system:
        await ask(system, first)
        await crowd_out(system, reference, others, len(first) // 16)
        answers = await asyncio.gather(*(ask(system, first) for _ in range(3)))
        assert {answer.num_cached for answer in answers} == {full(len(first) - 1)}
        text = reference.text(first, NUM_OUT, ignore_eos=True)
        assert [answer.texts for answer in answers] == [[text]] * 3
        system.until(lambda: tier(system)["restored_blocks"] == full(len(first) - 1) // 16)
        system.until(system.all_blocks_free)


async def test_it_outlives_the_worker_that_computed_it(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [first, *others] = Reference(directory, model), prompts(3, 180, 200, seed=33)
    with SlowSystem(directory, *tiny(20), memory_flags=TIER).start() as system:
        await ask(system, first)
        await crowd_out(system, reference, others, len(first) // 16)
        await asyncio.to_thread(system.kill, "prefill-0")
        system.start_worker("prefill-0")
        system.wait_ready(1, 1)
        warm = await ask(system, first)
        assert (warm.num_cached, warm.texts) == (
            full(len(first) - 1),
            [reference.text(first, NUM_OUT, ignore_eos=True)],
        )


async def test_between_pools_what_is_restored_is_handed_over_like_what_was_computed(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [first, *others] = Reference(directory, model), prompts(4, 180, 200, seed=34)
    with SlowSystem(directory, *tiny(20), memory_flags=TIER).start(apart=True) as system:
        await ask(system, first)
        await crowd_out(system, reference, others, len(first) // 16)
        warm = await ask(system, first)
        assert (warm.num_cached, warm.texts) == (
            full(len(first) - 1),
            [reference.text(first, NUM_OUT, ignore_eos=True)],
        )
        system.until(lambda: tier(system)["restored_blocks"] > 0)
        assert tier(system, "memory-decode")["restored_blocks"] == 0, "what another pool has is pulled from there"
        system.until(system.all_blocks_free)


async def test_who_had_to_make_room_is_not_computed_again(checkpoint: Checkpoint) -> None:
    """Eight texts grow in a pool that has room for three of them."""
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(8, 130, 150, seed=35)
    num_out = 150
    with SlowSystem(directory, *tiny(40), memory_flags=TIER).start() as system:
        streams = [Completion() for _ in asked]
        await complete_all(system.url, asked, streams, max_tokens=num_out, ignore_eos=True)
        texts = [reference.text(prompt, num_out, ignore_eos=True) for prompt in asked]
        assert [stream.text for stream in streams] == texts
        assert "makes room" in system.log("decode-0"), "nobody had to"
        assert metric(system, "baton_cached_prompt_tokens_total") >= full(130 + NUM_OUT), "and nothing was found again"
        system.until(system.all_blocks_free)
