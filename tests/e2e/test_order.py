"""Prompts wait for prompts by what is left, by turn and by priority, through the real programs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import Completion, Reference, complete, prompts
from tests.e2e.held_system import HeldSystem

Checkpoint = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["prefill worker", "local"])
async def test_who_comes_later_and_is_short_or_urgent_is_done_before_those_that_wait(
    num_prefill: int, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3-tied")
    flags = ["--prefill-max-batch-tokens", "64", "--decode-local-chunk-tokens", "64"]
    flags += ["--kv-transport", "auto" if num_prefill else "none"]
    longs, (short, urgent) = prompts(20, 300, 320, seed=1), (prompts(1, 8, 8)[0], prompts(1, 320, 320)[0])
    ended: list[str] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(name: str, prompt: list[int], priority: int = 0) -> Completion:
            completion = await complete(session, system.url, prompt, max_tokens=2, priority=priority)
            ended.append(name)
            return completion

        with HeldSystem(directory, *flags).start(prefill=num_prefill) as system:
            system.holds.prompt_steps.set(12)  # two prompts take ten
            tasks = [asyncio.create_task(ask("long", prompt, 1)) for prompt in longs]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            later = [asyncio.create_task(ask(*each)) for each in (("short", short, 1), ("urgent", urgent))]
            await asyncio.to_thread(system.until, lambda: system.num_active() + len(ended) == len(longs) + 2)
            system.release()
            completions = await asyncio.gather(*later, *tasks)
    reference = Reference(directory, model)
    assert [c.text for c in completions[:4]] == [reference.text(prompt, 2) for prompt in [short, urgent, *longs[:2]]]
    assert ended.index("short") < 12 and ended.index("urgent") < 12, ended
