"""A reply is in the pool of who decoded it; the next turn's prompt worker takes it from there, or computes it."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, begun
from tests.e2e.slow_system import SlowSystem
from tests.e2e.system import System
from tests.e2e.test_prefixes import ANY_LENGTH, BLOCK, NUM_OUT, ask, full, metric

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
HOMES = {"decode-0": "memory-0", "decode-1": "memory-1"}


def is_quiet(system: System) -> bool:
    """The router knows what is where, and prompt workers can take from all other pools."""
    servers, workers = system.health()["memory_servers"], system.health()["workers"]
    is_known = all(server["known_blocks"] == server["cached_blocks"] for server in servers)
    logs = [system.log(worker["id"]) for worker in workers["prefill"]]
    have_met = all(f"taken from {worker['id']}:" in log for log in logs for worker in workers["decode"])
    return system.all_blocks_free() and is_known and have_met


async def quiet(system: System) -> None:
    await asyncio.to_thread(system.until, lambda: is_quiet(system))


def pulled(system: System, worker: str) -> int:
    """Blocks from other pools."""
    lines = [line.split() for line in system.text("/metrics").splitlines() if f'worker="{worker}"' in line]
    return int(float(next(value for name, value in lines if name.startswith("baton_worker_pulled_blocks_total{"))))


async def test_a_turn_computes_and_moves_what_is_new_although_replies_are_elsewhere(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [history, *questions] = Reference(directory, model), prompts(4, 40, 70, seed=51)
    with SlowSystem(directory, *ANY_LENGTH).start(apart=True) as system:
        num_here = num_there = num_taken = num_moved = 0  # tokens of the conversation here and there, blocks in all
        for question in [[], *questions]:
            await quiet(system)
            assert (pulled(system, "prefill-0"), pulled(system, "decode-0")) == (num_taken, num_moved)
            history = history + question
            answer = await ask(system, history)
            assert answer.texts == [reference.text(history, NUM_OUT, ignore_eos=True)]
            assert answer.num_cached == full(num_there)
            num_taken += (full(num_there) - full(num_here)) // BLOCK
            num_moved += -(-len(history) // BLOCK) - full(num_there) // BLOCK
            num_here, history = len(history), history + answer.token_ids
            num_there = len(history) - 1  # the last token's KV was never computed
        assert num_taken >= 3
        await quiet(system)


async def test_where_replies_are_not_to_be_taken_they_are_computed(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [prompt, question] = Reference(directory, model), prompts(2, 60, 60, seed=55)
    with SlowSystem(directory, *ANY_LENGTH, "--kv-take-replies", "false").start(apart=True) as system:
        history = prompt + (await ask(system, prompt, max_tokens=40)).token_ids + question
        await asyncio.to_thread(system.until, system.all_blocks_free)
        answer = await ask(system, history)
        assert answer.texts == [reference.text(history, NUM_OUT, ignore_eos=True)]
        assert answer.num_cached == full(60) == metric(system, "baton_expected_cached_prompt_tokens_total")
        assert pulled(system, "prefill-0") == 0 and "replies" not in system.log("prefill-0")


async def test_texts_of_one_prompt_take_it_once_and_of_another_tenant_nothing(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [prompt] = Reference(directory, model), prompts(1, 60, 60, seed=52)
    with SlowSystem(directory, *ANY_LENGTH).start(apart=True) as system:
        await quiet(system)
        history = prompt + (await ask(system, prompt, max_tokens=40)).token_ids
        await quiet(system)
        before = pulled(system, "prefill-0")
        salted = await ask(system, history, cache_salt="another")
        answer = await ask(system, history, n=4)
        assert (salted.num_cached, answer.num_cached) == (0, full(99))
        assert answer.texts == [reference.text(history, NUM_OUT, ignore_eos=True)] * 4
        await quiet(system)
        assert pulled(system, "prefill-0") - before == full(99) // BLOCK - full(60) // BLOCK


@pytest.mark.parametrize("victim", ["decode-0", "memory-0", "prefill-0"])
async def test_who_dies_amid_it_costs_no_text(victim: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [prompt, question] = Reference(directory, model), prompts(2, 60, 60, seed=53)
    with HeldSystem(directory, *ANY_LENGTH, "--worker-drain-s", "2").start(1, 1, homes=HOMES) as system:
        await quiet(system)
        history = prompt + (await ask(system, prompt, max_tokens=40)).token_ids + question
        await quiet(system)
        system.start_worker("decode-1")
        system.wait_ready(1, 2)
        system.holds.retrievals.set(0)
        task = asyncio.create_task(ask(system, history))
        await asyncio.to_thread(system.until, lambda: "held amid a retrieval" in system.log("prefill-0"))
        await asyncio.to_thread(system.kill, victim)
        if victim == "prefill-0":
            system.until(lambda: not system.health()["workers"]["prefill"])
        else:
            system.until(lambda: len(system.health()["workers"]["decode"]) == 1)
        system.release()
        answer = await task
        assert answer.texts == [reference.text(history, NUM_OUT, ignore_eos=True)]
        system.until(system.all_blocks_free)


async def test_without_an_answer_it_is_computed(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [prompt, question] = Reference(directory, model), prompts(2, 60, 60, seed=54)
    with SlowSystem(directory, *ANY_LENGTH).start(apart=True) as system:
        await quiet(system)
        history = prompt + (await ask(system, prompt, max_tokens=40)).token_ids + question
        await quiet(system)
        system.processes["memory-decode"].send_signal(signal.SIGSTOP)
        streams = [Completion()]
        task = asyncio.create_task(complete_all(system.url, [history], streams, max_tokens=NUM_OUT, ignore_eos=True))
        await begun(task, streams, 1)
        system.processes["memory-decode"].send_signal(signal.SIGCONT)
        [answer] = await task
        assert answer.text == reference.text(history, NUM_OUT, ignore_eos=True)
        assert metric(system, "baton_cached_prompt_tokens_total") == full(60), "what is in its own pool"
        await quiet(system)
