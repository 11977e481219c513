"""The whole path writes the text that a single process writes, whatever is switched off."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, begun
from tests.e2e.system import System
from tests.support.checkpoints import VARIANTS
from tests.support.marks import first_then

Checkpoint = Callable[[str], tuple[Path, Any]]


def assert_equal(completions: list[Completion], reference: Reference, asked: list[list[int]], max_tokens: int) -> None:
    assert [c.error for c in completions] == [None] * len(asked)
    assert [c.text for c in completions] == reference.texts(asked, completions, max_tokens, ignore_eos=False)


def test_a_reference_takes_of_a_guess_what_is_right(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    [prompt], right = prompts(1, 20, 20), list[int]()
    while len(right) < 9:
        right.append(int(model(torch.tensor([[*prompt, *right]])).logits[0, -1].argmax()))

    def text(*guess: int, eos: int | None = None) -> str:
        reference = Reference(directory, model, lambda: None)
        reference.eos = eos
        return reference.text(prompt, 9, guess=guess)

    whole, until_eos = text(), text(eos=right[4])
    assert whole.startswith(until_eos) and len(whole) > len(until_eos) > 0
    for guess in (right, right[:4], [*right[:3], right[3] + 1, *right[4:]], [right[0] + 1], [*right, 5]):
        assert (text(*guess), text(*guess, eos=right[4])) == (whole, until_eos)


@pytest.mark.parametrize("variant", first_then(pytest.mark.medium, VARIANTS))
async def test_text_equals_a_single_process(variant: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint(variant)
    asked = prompts(8, 1, 120)
    with System(directory).start() as system:
        completions = await complete_all(system.url, asked, max_tokens=24, return_token_ids=True)
        assert_equal(completions, Reference(directory, model), asked, 24)
        system.until(system.all_blocks_free)


@pytest.mark.medium
@pytest.mark.parametrize(
    "flags",
    [
        ("--worker-batching", "false"),
        ("--prefill-max-batch-tokens", "32"),
        ("--prefill-max-batch-tokens", "32", "--prefill-chunking", "false"),
        ("--kv-block-size", "64"),
        ("--kv-transport", "none"),
    ],
    ids=["no-batching", "chunks", "no-chunking", "large-blocks", "no-transport"],
)
async def test_switches_change_nothing_but_speed(flags: tuple[str, ...], checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(6, 1, 120, seed=1)
    with System(directory, *flags).start(prefill="none" not in flags) as system:
        completions = await complete_all(system.url, asked, max_tokens=16)
        assert_equal(completions, Reference(directory, model), asked, 16)
        system.until(system.all_blocks_free)


@pytest.mark.medium
async def test_two_of_each_share_the_load(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(12, 20, 100, seed=2)
    with HeldSystem(directory).start(prefill=2, decode=2) as system:
        streams = [Completion() for _ in asked]
        system.holds.texts.set(1)  # all of them are there before one ends
        task = asyncio.create_task(complete_all(system.url, asked, streams, max_tokens=16))
        await begun(task, streams, 1)
        system.release()
        assert_equal(await task, Reference(directory, model), asked, 16)
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            assert any(name in line for line in system.log("router").splitlines() if "finished" in line)


@pytest.mark.medium
@pytest.mark.parametrize("flags", [(), ("--prefill-max-batch-tokens", "32")], ids=["whole", "chunks"])
async def test_a_pool_too_small_for_all_makes_them_wait_or_start_over_not_fail(
    flags: tuple[str, ...], checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(8, 60, 100, seed=3)
    block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    with HeldSystem(directory, "--kv-pool-bytes", str(24 * block_bytes), *flags).start() as system:
        system.holds.texts.set(1)  # all of them are there before one ends
        fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
        task = asyncio.create_task(complete_all(system.url, asked, **fields))
        await asyncio.to_thread(system.until, lambda: system.num_active() == len(asked))
        system.release()
        completions = await task
        assert [c.text for c in completions] == Reference(directory, model).texts(asked, completions, 60)
        assert "out of KV blocks" in system.log("decode-0"), "nothing was preempted: the pool is too large for the test"
        system.until(system.all_blocks_free)


@pytest.mark.medium
async def test_a_seeded_request_gives_the_same_text_in_any_batch(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    asked = prompts(6, 5, 60, seed=4)
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 100, "seed": 7, "max_tokens": 16}
    with System(directory).start() as system:
        together = await complete_all(system.url, asked, **sampled)
        alone = [(await complete_all(system.url, [prompt], **sampled))[0] for prompt in asked]
        other = await complete_all(system.url, asked, **{**sampled, "seed": 8})
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.text for c in together] != [c.text for c in other]
