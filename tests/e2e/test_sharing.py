"""Rows that share a prefix share it at every step, as the steps themselves check, and say what they would say alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Reference, complete_all, prompts
from tests.e2e.system import System
from tests.e2e.test_prefixes import ANY_LENGTH, ask

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
NUM_OUT = 40


class SharingSystem(System):
    """Its decode workers check what is shared; one that finds it wrong dies, and its requests with it."""

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        super().start_worker(name, *flags, module=module or ("tests.e2e.sharing_decode" if "decode" in name else ""))


def spared_bytes(system: System) -> float:
    lines = [line.split() for line in system.text("/metrics").splitlines() if 'worker="decode-0"' in line]
    return float(next(value for name, value in lines if name.startswith("baton_worker_spared_bytes_total{")))


@pytest.mark.parametrize("num_blocks", [60, 400])
async def test_texts_are_the_same_whoever_shares_what_with_whom(num_blocks: int, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference = Reference(directory, model)
    system_prompt, *documents = prompts(4, 40, 60, seed=61)
    questions = prompts(12, 3, 30, seed=62)
    asked = [system_prompt + documents[i % 3] * (i % 4 > 0) + question for i, question in enumerate(questions)]
    block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    with SharingSystem(directory, *ANY_LENGTH, "--kv-pool-bytes", str(num_blocks * block_bytes)).start() as system:
        for document in documents:
            await ask(system, system_prompt + document)
        several = asyncio.create_task(ask(system, asked[-1], n=5, max_tokens=NUM_OUT))
        completions = await complete_all(system.url, asked, max_tokens=NUM_OUT, ignore_eos=True)
        expected = [reference.text(prompt, NUM_OUT, ignore_eos=True) for prompt in asked]
        assert [completion.text for completion in completions] == expected
        assert (await several).texts == [expected[-1]] * 5
        assert "rows share a prefix" in system.log("decode-0")
        system.until(system.all_blocks_free)
        system.until(lambda: spared_bytes(system) > 0)


async def test_nothing_is_shared_where_that_is_off(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    [prompt] = prompts(1, 60, 60, seed=63)
    with SharingSystem(directory, *ANY_LENGTH, "--decode-share-prefixes", "false").start() as system:
        await ask(system, prompt, n=4)
        assert "share a prefix" not in system.log("decode-0") and spared_bytes(system) == 0
