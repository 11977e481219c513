"""Texts of models with windows and states: what is found in the cache, and what a death or a small pool costs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode_worker.sequences.sealing import DISTANCE_TOKENS
from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, begun
from tests.e2e.slow_system import SlowSystem
from tests.e2e.system import System
from tests.e2e.test_host_tier import crowd_out, tier
from tests.e2e.test_prefixes import ANY_LENGTH, NUM_OUT, ask, full, metric
from tests.e2e.test_replies import pulled, quiet

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
VARIANTS = ("mistral-window", "qwen3.5")
"""A window of 24 tokens alone; the delta rule beside attention."""
SMALL_POOL_BYTES = {"mistral-window": 18 * 16384, "qwen3.5": 24 * 8192 + 6 * 34000, "gemma3": 20 * 24576}
"""Room for two or three of six growing texts."""
MOST_ROUNDS = 12


class SmallSystem(System):
    """Its pool has so few blocks of tokens that texts make room for one another."""

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        super().start_worker(name, *flags, module=module or "tests.e2e.few_blocks")


@pytest.mark.parametrize("variant", [*VARIANTS, "gemma3"])
@pytest.mark.parametrize("apart", [False, True], ids=["one pool", "two pools"])
async def test_a_conversation_goes_on_behind_its_last_prompt_or_reply(
    variant: str, apart: bool, checkpoint: Checkpoint
) -> None:
    """Of a state, behind the last snapshot of the reply; what is in another pool is moved back."""
    directory, model = checkpoint(variant)
    has_states = variant == "qwen3.5"
    reference, [history, *questions] = Reference(directory, model), prompts(2 if has_states else 4, 50, 90, seed=71)
    num_out = 150 if has_states else NUM_OUT
    with SlowSystem(directory, *ANY_LENGTH, "--prefill-max-batch-tokens", "48").start(apart=apart) as system:
        num_known = 0
        for question in [[], *questions]:
            if apart:
                await quiet(system)
            history = history + question
            answer = await ask(system, history, max_tokens=num_out)
            assert answer.texts == [reference.text(history, num_out, ignore_eos=True, guess=answer.token_ids)]
            assert answer.num_cached == full(num_known)
            history = history + answer.token_ids
            assert not has_states or (len(history) - 1) % DISTANCE_TOKENS, "the step ahead would take another"
            num_known = len(history) - 1
            if has_states:
                num_known = num_known // DISTANCE_TOKENS * DISTANCE_TOKENS
        system.until(system.all_blocks_free)
        assert not apart or pulled(system, "prefill-0")


@pytest.mark.parametrize("variant", VARIANTS)
async def test_without_prefill_workers_equal_prompts_are_computed_once(variant: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint(variant)
    reference, [prompt, question] = Reference(directory, model), prompts(2, 90, 90, seed=72)
    flags = (*ANY_LENGTH, "--kv-transport", "none", "--decode-local-chunk-tokens", "32")
    with System(directory, *flags).start(prefill=0) as system:
        answer = await ask(system, prompt, n=3)
        assert answer.texts == [reference.text(prompt, NUM_OUT, ignore_eos=True)] * 3
        assert metric(system, "baton_cached_prompt_tokens_total") == 2 * full(89)
        answer = await ask(system, prompt + question)
        assert answer.texts == [reference.text(prompt + question, NUM_OUT, ignore_eos=True)]
        assert answer.num_cached == full(89)
        system.until(system.all_blocks_free)


@pytest.mark.parametrize("variant", [*VARIANTS, "gemma3"])
async def test_after_a_death_texts_go_on_behind_what_is_cached(variant: str, checkpoint: Checkpoint) -> None:
    """The prompt: a window of the reply is sealed at the end, and at doublings."""
    directory, model = checkpoint(variant)
    reference, asked = Reference(directory, model), prompts(4, 60, 90, seed=73)
    with HeldSystem(directory, *ANY_LENGTH, "--kv-pool-bytes", str(64 << 20)).start(decode=2) as system:
        streams = [Completion() for _ in asked]
        system.holds.texts.set(40)
        fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
        task = asyncio.create_task(complete_all(system.url, asked, streams, **fields))
        await begun(task, streams, 40)
        await asyncio.to_thread(system.kill, "decode-0")
        system.release()
        assert [c.text for c in await task] == reference.texts(asked, streams, 60)
        replayed = [line for line in system.log("router").splitlines() if "2 attempts" in line]
        assert replayed, "nothing was decoded by the one that died"
        assert metric(system, "baton_cached_prompt_tokens_total") >= len(replayed) * full(60 - 1)
        system.until(system.all_blocks_free)


@pytest.mark.parametrize("variant", [*VARIANTS, "gemma3"])
async def test_who_had_to_make_room_says_the_same(variant: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint(variant)
    reference, asked = Reference(directory, model), prompts(6, 60, 100, seed=74)
    with SmallSystem(directory, *ANY_LENGTH, "--kv-pool-bytes", str(SMALL_POOL_BYTES[variant])).start() as system:
        fields: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "return_token_ids": True}
        for _ in range(MOST_ROUNDS):  # who comes first decides whether texts grow at the same time
            completions = await complete_all(system.url, asked, **fields)
            assert [c.text for c in completions] == reference.texts(asked, completions, 90)
            if "out of KV blocks" in system.log("decode-0"):
                break
        else:
            pytest.fail("nothing was preempted: the pool is too large for the test")
        system.until(system.all_blocks_free)


@pytest.mark.parametrize("variant", [*VARIANTS, "gemma3"])
async def test_what_was_pushed_out_comes_back_from_host_memory(variant: str, checkpoint: Checkpoint) -> None:
    """A window's last blocks; all blocks of tokens, and the snapshot of the state."""
    directory, model = checkpoint(variant)
    reference, [first, *others] = Reference(directory, model), prompts(5, 180, 200, seed=75)
    num_blocks = full(len(first) - 1) // 16 + 1 if variant == "qwen3.5" else 2
    pool_bytes, tier_flags = str(SMALL_POOL_BYTES[variant]), ("--memory-host-tier-bytes", str(8 << 20))
    with SmallSystem(directory, *ANY_LENGTH, "--kv-pool-bytes", pool_bytes, memory_flags=tier_flags).start() as system:
        assert (await ask(system, first)).num_cached == 0
        await crowd_out(system, reference, others, num_blocks)
        warm = await ask(system, first)
        assert (warm.num_cached, warm.texts) == (
            full(len(first) - 1),
            [reference.text(first, NUM_OUT, ignore_eos=True)],
        )
        system.until(lambda: tier(system)["restored_blocks"] >= num_blocks)
        system.until(system.all_blocks_free)
