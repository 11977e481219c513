"""No request is lost when a worker dies, and nothing is kept for a client that went away."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import Completion, Reference, complete, complete_all, prompts
from tests.e2e.held_system import FEW, HeldSystem, held_while_streaming, killed_while_streaming
from tests.e2e.system import START_TIMEOUT_S, System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
MAX_TOKENS = 60


CHUNKS = ("--prefill-max-batch-tokens", "32")


@pytest.mark.parametrize(
    ("variant", "flags", "apart"),
    [
        ("qwen3-tied", (), False),
        ("qwen3-tied", CHUNKS, False),
        ("qwen3-tied", CHUNKS, True),
        ("qwen3.5", CHUNKS, False),
        ("qwen3.5", CHUNKS, True),
        ("mistral-window", CHUNKS, False),
        ("mistral-window", CHUNKS, True),
        ("deepseek-v2-lite", CHUNKS, False),
        ("deepseek-v2-lite", CHUNKS, True),
    ],
    ids=[
        "whole",
        "chunks",
        "chunks-pulled",
        "states",
        "states-pulled",
        "window",
        "window-pulled",
        "latents",
        "latents-pulled",
    ],
)
async def test_a_decode_worker_dies_mid_stream(
    variant: str, flags: tuple[str, ...], apart: bool, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint(variant)
    asked = prompts(6, 10, 60, seed=5)
    with HeldSystem(directory, *flags).start(decode=2, apart=apart) as system:
        texts = await killed_while_streaming(system, "decode-0", asked, MAX_TOKENS)
        assert texts == [Reference(directory, model).text(p, MAX_TOKENS, ignore_eos=True) for p in asked]
        system.until(system.all_blocks_free)


async def test_streams_of_a_dead_worker_go_on_at_its_standby_and_nothing_before_that(checkpoint: Checkpoint) -> None:
    """Without a restart: nobody starts decode-0 again until all is over."""
    directory, model = checkpoint("qwen3-tied")
    asked, reference = prompts(6, 10, 60, seed=17), Reference(directory, model)
    with HeldSystem(directory).start() as system:
        system.start_worker("decode-standby", "--worker-standby", "1")
        system.wait_ready(1, 2)
        system.until(lambda: system.in_reserve() == {"decode-standby"})
        killed = asyncio.create_task(killed_while_streaming(system, "decode-0", asked, MAX_TOKENS))
        most_in_reserve = 0
        while not killed.done():
            standby, in_reserve = await asyncio.to_thread(standby_of, system)
            most_in_reserve = max(most_in_reserve, standby["assigned_sequences"] if in_reserve else 0)
            await asyncio.sleep(0.01)
        assert most_in_reserve == 0
        assert await killed == [reference.text(p, MAX_TOKENS, ignore_eos=True) for p in asked]
        assert system.in_reserve() == set()
        system.start_worker("decode-0")
        system.until(lambda: system.in_reserve() == {"decode-standby"}, START_TIMEOUT_S)
        system.until(system.all_blocks_free)


def standby_of(system: System) -> tuple[dict[str, Any], bool]:
    """The only standby, by the router, and whether it is in reserve."""
    [worker] = [worker for worker in system.health()["workers"]["decode"] if worker["standby"]]
    return worker, worker["standby"]["in_reserve"]


async def test_seeded_streams_continue_the_same_text_after_a_kill(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("llama")
    asked = prompts(4, 10, 60, seed=6)
    with HeldSystem(directory).start(decode=2) as system:
        sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
        calm = await complete_all(system.url, asked, max_tokens=MAX_TOKENS, ignore_eos=True, **sampled)
        texts = await killed_while_streaming(system, "decode-1", asked, MAX_TOKENS, **sampled)
        assert texts == [c.text for c in calm]


async def test_the_only_prefill_worker_dies_and_prompts_are_computed_by_the_decode_worker(
    checkpoint: Checkpoint,
) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(8, 50, 200, seed=7)
    with HeldSystem(directory, "--prefill-max-batch-tokens", "32").start() as system:
        streams = [Completion() for _ in asked]
        system.holds.prompt_steps.set(12)  # of the forty that it takes
        task = asyncio.create_task(complete_all(system.url, asked, streams, max_tokens=MAX_TOKENS, ignore_eos=True))
        while not any(stream.num_tokens for stream in streams):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(system.kill, "prefill-0")
        assert not all(stream.num_tokens for stream in streams)
        system.release()
        reference = Reference(directory, model)
        assert [c.text for c in await task] == [reference.text(p, MAX_TOKENS, ignore_eos=True) for p in asked]
        system.until(system.all_blocks_free)
        system.start_worker("prefill-0")
        system.wait_ready(1, 1)
        [again] = await complete_all(system.url, asked[:1], max_tokens=8)
        assert again.text == reference.text(asked[0], 8)


async def test_a_restarted_decode_worker_takes_over_what_its_predecessor_lost(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(4, 10, 60, seed=8)
    with HeldSystem(directory).start() as system:
        task = asyncio.create_task(killed_while_streaming(system, "decode-0", asked, MAX_TOKENS))
        while "decode-0" in system.processes and not task.done():
            await asyncio.sleep(0.01)
        system.start_worker("decode-0")
        assert await task == [Reference(directory, model).text(p, MAX_TOKENS, ignore_eos=True) for p in asked]


async def test_a_client_that_leaves_frees_its_blocks(checkpoint: Checkpoint) -> None:
    """Whenever it leaves; here no text ends by itself."""
    directory, _ = checkpoint("qwen3-tied")
    with HeldSystem(directory, "--prefill-max-batch-tokens", "16").start() as system:
        system.holds.texts.set(FEW)
        for delay_s in (0.0, 0.02, 0.1, None):
            async with aiohttp.ClientSession() as session:
                requests = [
                    asyncio.create_task(complete(session, system.url, p, max_tokens=400, ignore_eos=True))
                    for p in prompts(4, 80, 100, seed=9)
                ]
                if delay_s is None:
                    await asyncio.to_thread(system.until, lambda: not system.all_blocks_free())
                else:
                    await asyncio.sleep(delay_s)
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
            await asyncio.to_thread(system.until, system.all_blocks_free)


async def test_a_restarted_router_finds_its_workers_again(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(2, 10, 60, seed=10)
    with HeldSystem(directory).start() as system:
        task = await held_while_streaming(system, asked, 400)
        system.kill("router")
        with pytest.raises(aiohttp.ClientError):
            await task
        system.release()
        system.start_router()
        system.wait_ready(1, 1)
        system.until(system.all_blocks_free)
        completions = await complete_all(system.url, asked, max_tokens=8)
        assert [c.text for c in completions] == [Reference(directory, model).text(p, 8) for p in asked]


async def test_terminated_processes_finish_what_runs_and_exit_0(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(3, 10, 60, seed=11)
    with HeldSystem(directory).start() as system:
        task = await held_while_streaming(system, asked, 100)
        end = asyncio.create_task(asyncio.to_thread(system.kill, "router", signal.SIGTERM))
        await asyncio.to_thread(system.until, lambda: "draining 3 completions" in system.log("router"))
        system.release()
        assert await end == 0
        for name in ("prefill-0", "decode-0"):
            assert await asyncio.to_thread(system.kill, name, signal.SIGTERM) == 0
        assert "are kept until" not in system.log("memory"), "they gave back what they had at hand"
        reference = Reference(directory, model)
        assert [c.text for c in await task] == [reference.text(p, 100, ignore_eos=True) for p in asked]


async def test_a_thread_that_hangs_keeps_no_worker(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    with System(directory).start() as system:
        system.start_worker("decode-1", module="tests.e2e.stuck_decode")
        await asyncio.to_thread(system.wait_ready, 1, 2)
        assert await asyncio.to_thread(system.kill, "decode-1", signal.SIGTERM) == 0
        assert "ending without threads that hang: stuck" in system.log("decode-1")


async def test_a_worker_that_leaves_waits_for_the_prompts_that_are_bound_to_it(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(12, 100, 120, seed=12)
    with HeldSystem(directory, "--prefill-max-num-seqs", "1").start(prefill=2, decode=2) as system:
        system.holds.prompt_steps.set(0)
        stream = asyncio.create_task(complete_all(system.url, asked, max_tokens=3, ignore_eos=True))
        await asyncio.to_thread(system.until, lambda: all_are_bound(system, asked))
        leaving = ("decode-0", "prefill-0")
        ends = [asyncio.create_task(asyncio.to_thread(system.kill, name, signal.SIGTERM)) for name in leaving]
        await asyncio.to_thread(system.until, lambda: system.log("router").count("it gets nothing new") == 2)
        system.release()
        assert await asyncio.gather(*ends) == [0, 0]
        reference = Reference(directory, model)
        assert [c.text for c in await stream] == [reference.text(p, 3, ignore_eos=True) for p in asked]
        assert "replayed" not in system.log("router"), system.log("router")


async def test_a_handoff_that_is_lost_is_computed_again(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(2, 10, 60, seed=16)
    with System(directory) as system:
        system.start_router()
        system.start_worker("prefill-0")
        system.start_worker("decode-0", module="tests.e2e.forgetful_decode")
        system.wait_ready(1, 1)
        completions = await complete_all(system.url, asked, max_tokens=8)
        assert [c.text for c in completions] == [Reference(directory, model).text(p, 8) for p in asked]
        assert system.log("router").count("replayed after 1 tokens") == 1
        system.until(system.all_blocks_free)


def all_are_bound(system: System, asked: list[list[int]]) -> bool:
    """Whether each prefill worker says that it has some of the prompts, and none is still on its way to one."""
    workers = system.health()["workers"]["prefill"]
    num_prompts = [(worker["num_waiting"] or 0) + (worker["num_running"] or 0) for worker in workers]
    return min(num_prompts) > 0 and sum(num_prompts) == len(asked)


async def test_each_request_goes_where_its_length_has_room(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = [*prompts(4, 10, 20, seed=13), *prompts(4, 70, 90, seed=14), *prompts(4, 150, 180, seed=15)]
    with System(directory) as system:
        system.start_router()
        for name, max_len in (("prefill-0", 64), ("prefill-1", 100), ("decode-0", 64), ("decode-1", 200)):
            system.start_worker(name, "--model-max-len", str(max_len))
        system.wait_ready(2, 2)
        reference = Reference(directory, model)
        completions = await complete_all(system.url, asked, max_tokens=8, ignore_eos=True)
        assert [c.text for c in completions] == [reference.text(p, 8, ignore_eos=True) for p in asked]
        most = 200 - len(asked[-1])
        [again] = await complete_all(system.url, asked[-1:], max_tokens=most, ignore_eos=True)
        assert again.usage["total_tokens"] == 200
        [refused] = await complete_all(system.url, asked[-1:], max_tokens=most + 1, ignore_eos=True)
        assert refused.error["error"]["code"] == "context_length_exceeded", "no worker takes more"


async def test_a_worker_of_another_model_is_refused_and_says_why(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    other, _ = checkpoint("qwen3-untied")
    with System(directory).start() as system:
        system.model = other
        system.start_worker("decode-9")
        assert await asyncio.to_thread(system.processes["decode-9"].wait, START_TIMEOUT_S) == 2
        assert "the router refused this worker" in system.log("decode-9")
        [completion] = await complete_all(system.url, prompts(1, 5, 5), max_tokens=2)
        assert completion.error is None


async def test_a_death_is_noticed_by_the_closed_connection_not_by_silence(checkpoint: Checkpoint) -> None:
    """Silence would say so in an hour, and the memory server says nothing to the router."""
    directory, model = checkpoint("llama")
    asked = prompts(4, 10, 60, seed=14)
    with HeldSystem(directory, "--net-worker-timeout-s", "3600") as system:
        system.start_router()
        system.start_memory("memory", "--net-router-endpoint", f"ipc://{system.directory.name}/nobody")
        for name in ("prefill-0", "decode-0", "decode-1"):
            system.start_worker(name)
        system.wait_ready(1, 2)
        texts = await killed_while_streaming(system, "decode-0", asked, MAX_TOKENS)
        assert texts == [Reference(directory, model).text(p, MAX_TOKENS, ignore_eos=True) for p in asked]
        assert "decode-0" in system.log("router") and "its connection is gone" in system.log("router")
