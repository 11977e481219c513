"""Weights are in memory once and KV blocks in one pool; both outlive who uses them, and nobody notices who dies."""

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.wire.messages.worker import SHARED_POOL
from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, begun, held_while_streaming
from tests.e2e.system import START_TIMEOUT_S, TIMEOUT_S, System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
MAX_TOKENS = 60


def mappings(system: System, name: str) -> set[tuple[str, str]]:
    """(permissions, file) of the memory that a process has from its memory server."""
    lines = Path(f"/proc/{system.processes[name].pid}/maps").read_text().splitlines()
    return {(line.split()[1], line.split()[4]) for line in lines if "memfd:baton" in line}


async def test_workers_read_the_same_weights_and_a_restarted_one_loads_none(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(4, 10, 60, seed=40)
    texts = [reference.text(prompt, 12) for prompt in asked]
    with System(directory).start() as system:
        assert [c.text for c in await complete_all(system.url, asked, max_tokens=12)] == texts
        maps = [mappings(system, name) for name in ("prefill-0", "decode-0")]
        assert maps[0] == maps[1]
        assert sorted(access for access, _ in maps[0]) == ["r--s", "rw-s"], (
            "weights that nobody can write, and the pool"
        )
        for name in ("prefill-0", "decode-0"):
            await asyncio.to_thread(system.kill, name)
            system.start_worker(name)
            system.until(lambda name=name: "ready to serve" in system.log(name), START_TIMEOUT_S)  # type: ignore[misc]
            assert "loading weights" not in system.log(name)
            assert mappings(system, name) == maps[0]
        system.wait_ready(1, 1)
        assert [c.text for c in await complete_all(system.url, asked, max_tokens=12)] == texts


async def test_prompts_that_were_handed_over_need_their_prefill_worker_no_more(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(6, 10, 60, seed=45)
    with HeldSystem(directory, "--decode-max-num-seqs", "2").start(decode=2) as system:
        streams = [Completion() for _ in asked]
        system.holds.texts.set(1)  # the token that comes with the prompt
        task = asyncio.create_task(complete_all(system.url, asked, streams, max_tokens=40, ignore_eos=True))
        while sum(stream.num_tokens for stream in streams) < 4:
            assert not task.done()
            await asyncio.sleep(0.005)
        await asyncio.to_thread(system.kill, "prefill-0")
        await asyncio.to_thread(
            system.until, lambda: re.search("prefill-0 .* is lost", system.log("router")) is not None
        )
        system.release()
        reference = Reference(directory, model)
        assert [c.text for c in await task] == [reference.text(prompt, 40, ignore_eos=True) for prompt in asked]
        assert "replayed after 1 tokens" not in system.log("router")
        system.until(system.all_blocks_free)


async def test_a_pool_that_is_too_small_for_four_workers_starves_none(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(10, 60, 100, seed=46)
    block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    with HeldSystem(directory, "--kv-pool-bytes", str(28 * block_bytes)).start(prefill=2, decode=2) as system:
        system.holds.texts.set(1)
        task = asyncio.create_task(complete_all(system.url, asked, max_tokens=60, ignore_eos=True))
        await asyncio.to_thread(system.until, lambda: system.num_active() == len(asked))
        system.release()
        reference = Reference(directory, model)
        assert [c.text for c in await task] == [reference.text(prompt, 60, ignore_eos=True) for prompt in asked]
        system.until(system.all_blocks_free)


async def test_blocks_are_pulled_where_pools_differ_and_change_hands_where_not(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("llama")
    reference, asked = Reference(directory, model), prompts(6, 10, 60, seed=43)
    with System(directory, "--prefill-max-batch-tokens", "32") as system:
        system.homes["prefill-0"] = "memory-1"
        system.start_router()
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            system.start_worker(name)
        system.wait_ready(2, 2)
        transports = {(path["prefill"], path["transport"]) for path in system.health()["kv_paths"]}
        assert transports == {("prefill-0", "shm"), ("prefill-1", SHARED_POOL)}
        texts = [c.text for c in await complete_all(system.url, asked, max_tokens=20)]
        assert texts == [reference.text(prompt, 20) for prompt in asked]
        system.start_worker("decode-2")
        system.wait_ready(2, 3)  # it finds the pool's pattern, although others have proven a path there
        system.until(system.all_blocks_free)


async def test_prompts_in_another_pool_outlive_who_computed_them_and_are_lost_with_the_pool(
    checkpoint: Checkpoint,
) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked, reference = prompts(6, 10, 60, seed=49), Reference(directory, model)
    with HeldSystem(directory, "--decode-max-num-seqs", "2").start(apart=True) as system:
        for victim in ("prefill-0", "memory"):
            streams = [Completion() for _ in asked]
            system.holds.texts.set(1)  # the token that comes with the prompt
            task = asyncio.create_task(complete_all(system.url, asked, streams, max_tokens=20, ignore_eos=True))
            await begun(task, streams, 1)
            log = system.log("router")
            await asyncio.to_thread(system.kill, victim)
            if victim == "memory":
                assert await asyncio.to_thread(system.processes.pop("prefill-0").wait, TIMEOUT_S) == 0
                system.start_memory()
            system.start_worker("prefill-0")
            system.release()
            assert [c.text for c in await task] == [reference.text(p, 20, ignore_eos=True) for p in asked]
            said = system.log("router").removeprefix(log)
            assert ("replayed after 1 tokens" in said) == (victim == "memory"), said
            await asyncio.to_thread(system.wait_ready, 1, 1)
            system.until(system.all_blocks_free)


async def test_without_their_memory_server_workers_finish_what_they_have_and_start_again_with_the_next(
    checkpoint: Checkpoint,
) -> None:
    directory, model = checkpoint("llama")
    reference, asked = Reference(directory, model), prompts(4, 10, 60, seed=41)
    with HeldSystem(directory).start() as system:
        task = await held_while_streaming(system, asked, MAX_TOKENS)
        await asyncio.to_thread(system.kill, "memory")
        await asyncio.to_thread(system.until, lambda: system.log("router").count("it gets nothing new") == 2)
        late = asyncio.create_task(complete_all(system.url, asked[:1], max_tokens=8))
        system.release()
        system.start_memory()
        for name in ("prefill-0", "decode-0"):
            assert await asyncio.to_thread(system.processes.pop(name).wait, TIMEOUT_S) == 0, system.log(name)
            assert "memory.sock: it closed the connection" in system.log(name)
            system.start_worker(name)
        texts = [reference.text(prompt, MAX_TOKENS, ignore_eos=True) for prompt in asked]
        assert [c.text for c in await task] == texts
        [waited] = await late
        assert (waited.error, waited.text) == (None, reference.text(asked[0], 8))
        await asyncio.to_thread(system.wait_ready, 1, 1)
        system.until(system.all_blocks_free)


async def test_after_a_fault_of_a_device_nothing_is_used_that_it_may_have_damaged(checkpoint: Checkpoint) -> None:
    """What is written to, here, is the whole pool: its free blocks, those of others, and its proof block."""
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(6, 10, 60, seed=47)
    with HeldSystem(directory) as system:
        system.start_with_faulty()
        task = await held_while_streaming(system, asked, MAX_TOKENS)
        system.holds.faults.set(0)
        for name, status in (("decode-1", 1), ("decode-0", 0), ("prefill-0", 0)):
            assert await asyncio.to_thread(system.processes.pop(name).wait, TIMEOUT_S) == status, system.log(name)
            assert ("leaving at once" in system.log(name)) == (status == 0)
            system.start_worker(name)
        system.release()
        texts = [reference.text(prompt, MAX_TOKENS, ignore_eos=True) for prompt in asked]
        assert [c.text for c in await task] == texts
        await asyncio.to_thread(system.wait_ready, 1, 2)
        assert system.log("memory").count("met a fault of its device") == 1
        assert system.log("memory").count(" fills ") == 2, "weights are loaded again"


def test_who_loads_may_die_and_another_does(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-untied")
    with System(directory) as system:
        system.start_router()
        system.start_memory()
        system.start_worker("prefill-0")
        system.until(lambda: "fills" in system.log("memory"), START_TIMEOUT_S)
        system.kill("prefill-0", signal.SIGKILL)
        system.start_worker("decode-0")
        system.start_worker("prefill-0")
        system.wait_ready(1, 1)


async def test_the_router_hears_of_a_death_from_the_memory_server_and_both_may_start_again(
    checkpoint: Checkpoint,
) -> None:
    directory, model = checkpoint("llama")
    reference, asked = Reference(directory, model), prompts(2, 10, 60, seed=43)
    with HeldSystem(directory) as system:
        rarely = ("--net-heartbeat-s", "60", "--net-worker-timeout-s", "240")  # so seldom it knocks at doors
        system.start_router(0, *rarely)
        system.start_memory()
        for name in ("prefill-0", "decode-0", "decode-1"):
            system.start_worker(name)
        system.wait_ready(1, 2)
        task = await held_while_streaming(system, asked, MAX_TOKENS)
        await asyncio.to_thread(system.kill, "decode-1")
        system.release()
        assert [c.text for c in await task] == [reference.text(prompt, MAX_TOKENS, ignore_eos=True) for prompt in asked]
        assert "lost: memory server memory saw its process end" in system.log("router")

        system.until(lambda: sorted(shown(system)[0]["workers"]) == ["decode-0", "prefill-0"])
        [before] = shown(system)
        assert (before["id"], before["device"]) == ("memory", "cpu") and before["weights_bytes"] > 0
        await asyncio.to_thread(system.kill, "router")
        system.start_router()
        system.until(lambda: [each["epoch"] for each in shown(system)] == [before["epoch"]])
        await asyncio.to_thread(system.kill, "memory")
        system.start_memory()
        system.until(lambda: [each["epoch"] for each in shown(system)] not in ([], [before["epoch"]]))


def shown(system: System) -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = system.health()["memory_servers"]
    return servers
