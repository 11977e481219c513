"""What was computed once is not computed again, and nobody's text is another for that."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import TIMEOUT, Completion, Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, begun
from tests.e2e.system import System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
BLOCK = 16
NUM_OUT = 24
ANY_LENGTH = ("--kv-prefix-min-tokens", "0")


class Answer:
    """To a request that is not streamed."""

    def __init__(self, body: Any) -> None:
        self.texts = [choice["text"] for choice in body["choices"]]
        self.token_ids: list[int] = body["choices"][0]["token_ids"]
        self.num_cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def ask(system: System, prompt: list[int], **fields: Any) -> Answer:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_OUT, "ignore_eos": True, "return_token_ids": True}
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(f"{system.url}/v1/completions", json=body | fields) as response,
    ):
        assert response.status == 200, await response.text()
        return Answer(await response.json())


async def converse(system: System, reference: Reference, block_size: int) -> None:
    """Four turns and the last again, each of which finds all before it that was ever computed, and says the same."""
    history, *questions = prompts(4, 30, 70, seed=21)
    num_known = 0
    for question in [[], *questions]:
        history = history + question
        answer = await ask(system, history)
        assert answer.texts == [reference.text(history, NUM_OUT, ignore_eos=True, guess=answer.token_ids)]
        assert answer.num_cached == num_known // block_size * block_size
        history = history + answer.token_ids
        num_known = len(history) - 1  # the last token's KV was never computed
    again = await ask(system, history[:num_known])
    assert again.num_cached == (num_known - 1) // block_size * block_size, "at least one token is computed"
    assert again.texts == [reference.text(history[:num_known], NUM_OUT, ignore_eos=True, guess=again.token_ids)]
    system.until(system.all_blocks_free)


def full(num_tokens: int) -> int:
    """Tokens in full blocks of so many."""
    return num_tokens // BLOCK * BLOCK


def metric(system: System, name: str) -> float:
    lines = system.text("/metrics").splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        ("qwen3-tied", ()),
        ("qwen3-tied", ("--prefill-max-batch-tokens", "48")),
        ("qwen3-tied", ("--kv-block-size", "64")),
        ("deepseek-v2-lite", ("--prefill-max-batch-tokens", "48")),
    ],
)
async def test_a_conversation_is_computed_once(variant: str, flags: tuple[str, ...], checkpoint: Checkpoint) -> None:
    directory, model = checkpoint(variant)
    with System(directory, *ANY_LENGTH, *flags).start() as system:
        await converse(system, Reference(directory, model), 64 if "64" in flags else BLOCK)


@pytest.mark.parametrize("flags", [(), ("--decode-local-chunk-tokens", "16")])
async def test_so_is_one_that_a_decode_worker_computes_itself(flags: tuple[str, ...], checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    [prompt] = prompts(1, 90, 90, seed=29)
    with System(directory, *ANY_LENGTH, "--kv-transport", "none", *flags).start(prefill=0) as system:
        await converse(system, reference := Reference(directory, model), BLOCK)
        num_cached = metric(system, "baton_cached_prompt_tokens_total")
        answer = await ask(system, prompt, n=4)
        assert answer.texts == [reference.text(prompt, NUM_OUT, ignore_eos=True)] * 4
        assert metric(system, "baton_cached_prompt_tokens_total") == num_cached + 3 * full(89)
        scored = await ask(system, prompt, echo=True, logprobs=1)
        assert (answer.num_cached, scored.num_cached) == (0, 0)
        system.until(system.all_blocks_free)


async def test_equal_prompts_that_come_together_are_computed_once(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    [prompt] = prompts(1, 90, 90, seed=22)
    with System(directory, *ANY_LENGTH, "--prefill-max-batch-tokens", "32").start() as system:
        answer = await ask(system, prompt, n=5)
        assert answer.texts == [Reference(directory, model).text(prompt, NUM_OUT, ignore_eos=True)] * 5
        assert answer.num_cached == 0, "it was computed for the first of them"
        assert metric(system, "baton_cached_prompt_tokens_total") == 4 * full(89)
        system.until(system.all_blocks_free)


async def test_who_shares_with_whom(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    [prompt] = prompts(1, 80, 80, seed=23)
    with System(directory, *ANY_LENGTH).start() as system:
        texts = set()
        for salt, expected in ((None, 0), (None, full(79)), ("a", 0), ("b", 0), ("a", full(79)), (None, full(79))):
            answer = await ask(system, prompt, cache_salt=salt)
            assert answer.num_cached == expected, salt
            texts |= {*answer.texts}
        assert len(texts) == 1
        scored = await ask(system, prompt, echo=True, logprobs=1)
        assert scored.num_cached == 0, "what is asked of the prompt's own tokens is computed"
    with System(directory, "--kv-prefix-cache", "false").start() as system:
        assert [(await ask(system, prompt)).num_cached for _ in range(2)] == [0, 0]


async def test_what_others_want_room_for_is_computed_again(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [first, *others] = Reference(directory, model), prompts(6, 80, 100, seed=24)
    block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    with System(directory, *ANY_LENGTH, "--kv-pool-bytes", str(16 * block_bytes)).start() as system:
        for prompt in (first, *others, first):
            answer = await ask(system, prompt)
            assert (answer.num_cached, answer.texts) == (0, [reference.text(prompt, NUM_OUT, ignore_eos=True)])
        assert (await ask(system, first)).num_cached == full(len(first) - 1)
        system.until(system.all_blocks_free)


async def test_after_a_death_less_than_a_block_is_computed_again(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(4, 60, 90, seed=25)
    with HeldSystem(directory, *ANY_LENGTH).start(decode=2) as system:
        streams = [Completion() for _ in asked]
        system.holds.texts.set(40)
        task = asyncio.create_task(complete_all(system.url, asked, streams, max_tokens=60, ignore_eos=True))
        await begun(task, streams, 40)
        await asyncio.to_thread(system.kill, "decode-0")
        system.release()
        assert [c.text for c in await task] == [reference.text(prompt, 60, ignore_eos=True) for prompt in asked]
        replayed = [line for line in system.log("router").splitlines() if "2 attempts" in line]
        assert replayed, "nothing was decoded by the one that died"
        num_cached = metric(system, "baton_cached_prompt_tokens_total")
        assert num_cached >= len(replayed) * full(60 + 40 - 1)
        system.until(system.all_blocks_free)


async def test_blocks_that_are_pulled_are_found_where_they_were_computed(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    [prompt] = prompts(1, 80, 80, seed=26)
    text = Reference(directory, model).text(prompt, NUM_OUT, ignore_eos=True)
    with System(directory, *ANY_LENGTH).start(apart=True) as system:
        for expected in (0, full(79)):
            answer = await ask(system, prompt)
            assert (answer.num_cached, answer.texts) == (expected, [text])
        system.until(system.all_blocks_free)


async def test_without_its_prefill_worker_a_conversation_goes_on_where_it_is(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [prompt, question] = Reference(directory, model), prompts(2, 60, 90, seed=30)
    with System(directory, *ANY_LENGTH).start() as system:
        history = prompt + (await ask(system, prompt)).token_ids
        await asyncio.to_thread(system.kill, "prefill-0")
        system.until(lambda: not system.health()["workers"]["prefill"])
        answer = await ask(system, history + question)
        assert answer.texts == [reference.text(history + question, NUM_OUT, ignore_eos=True)]
        assert answer.num_cached == full(len(history) - 1)
        system.until(system.all_blocks_free)


async def test_a_short_prompt_stays_where_it_is_decoded_while_prompt_workers_are_busy(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, longs = Reference(directory, model), prompts(4, 400, 400, seed=31)
    [question] = prompts(1, 10, 10, seed=32)
    flags = (*ANY_LENGTH, "--decode-short-prompt-tokens", "48")
    with HeldSystem(directory, *flags).start() as system:
        for prompt in longs[:3]:
            history = prompt + (await ask(system, prompt)).token_ids
        await asyncio.to_thread(system.until, system.all_blocks_free)
        system.holds.prompt_steps.set(3)  # the prefill worker has done as many
        waits = asyncio.create_task(ask(system, longs[3]))
        await asyncio.to_thread(system.until, lambda: system.num_active() == 1)
        answer = await ask(system, history + question)
        assert answer.texts == [reference.text(history + question, NUM_OUT, ignore_eos=True)]
        assert answer.num_cached == full(len(history) - 1) and not waits.done()
        assert "decoded where it is computed: " in system.log("router")
        system.release()
        assert (await waits).texts == [reference.text(longs[3], NUM_OUT, ignore_eos=True)]
        system.until(system.all_blocks_free)


def moved(system: System) -> tuple[int, int]:
    """Blocks of prompts that the decode worker has pulled, and that it had already."""
    lines = [line.split() for line in system.text("/metrics").splitlines()]
    counts = {line[0].split("{")[0]: float(line[1]) for line in lines if 'worker="decode-0"' in line[0]}
    return int(counts["baton_worker_pulled_blocks_total"]), int(counts["baton_worker_found_blocks_total"])


async def pulled_by(system: System, reference: Reference, prompt: list[int]) -> tuple[list[int], int]:
    """Says a text that is that of the reference; returns all of it, and how many blocks of the prompt were pulled."""
    before, num_blocks = moved(system), -(-len(prompt) // BLOCK)
    answer = await ask(system, prompt)
    assert answer.texts == [reference.text(prompt, NUM_OUT, ignore_eos=True)]
    system.until(lambda: sum(moved(system)) == sum(before) + num_blocks)  # heartbeats tell of them
    return prompt + answer.token_ids, moved(system)[0] - before[0]


async def test_a_turn_moves_only_the_blocks_that_the_decode_worker_lacks(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, [history, *questions] = Reference(directory, model), prompts(5, 40, 70, seed=27)
    with System(directory, *ANY_LENGTH).start(apart=True) as system:
        num_there = 0
        for number, question in enumerate([[], *questions]):
            if number == 3:  # what it had is computed again, and not moved again
                await asyncio.to_thread(system.kill, "prefill-0")
                system.until(lambda: not system.health()["workers"]["prefill"])
                system.start_worker("prefill-0")
                system.wait_ready(1, 1)
            history = history + question
            num_blocks = -(-len(history) // BLOCK)
            history, num_pulled = await pulled_by(system, reference, history)
            assert num_pulled == num_blocks - num_there
            num_there = (len(history) - 1) // BLOCK
        system.until(system.all_blocks_free)


async def test_what_was_evicted_is_moved_again(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(5, 80, 100, seed=28)
    block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    with System(directory, *ANY_LENGTH, "--kv-pool-bytes", str(16 * block_bytes)).start(apart=True) as system:
        for prompt in (*asked, asked[0]):
            _, num_pulled = await pulled_by(system, reference, prompt)
            assert num_pulled == -(-len(prompt) // BLOCK)
        _, num_pulled = await pulled_by(system, reference, asked[0])
        assert num_pulled < -(-len(asked[0]) // BLOCK)
        system.until(system.all_blocks_free)
