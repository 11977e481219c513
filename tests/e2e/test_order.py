"""Prompts wait for prompts by what is left, by turn and by priority, through the real programs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import Completion, Reference, complete, prompts
from tests.e2e.held_system import HeldSystem
from tests.e2e.system import TIMEOUT_S

pytestmark = pytest.mark.medium

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


async def have_begun(streams: list[Completion], num_tokens: int) -> None:
    """Wait until each has so many tokens."""
    async with asyncio.timeout(TIMEOUT_S):
        while min(stream.num_tokens for stream in streams) < num_tokens:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("variant", "apart"),
    [("qwen3-tied", False), ("qwen3-tied", True), ("qwen3.5", False), ("mistral-window", False)],
    ids=["one pool", "two pools", "states", "window"],
)
async def test_streams_give_their_rows_to_better_priority_and_go_on_with_the_same_text(
    variant: str, apart: bool, checkpoint: Checkpoint
) -> None:
    directory, _ = checkpoint(variant)
    asked: list[dict[str, Any]] = [
        {"presence_penalty": 1.5}, {"temperature": 0.8, "seed": 3}, {"structured_outputs": {"regex": "[a-z ]{60}"}},
    ]  # fmt: skip
    patient = [{**fields, "max_tokens": 60, "priority": 7, "ignore_eos": True} for fields in asked]
    texts, (urgent,) = prompts(len(patient), 20, 60, seed=4), prompts(1, 30, 30, seed=5)
    ended: list[str] = []
    with HeldSystem(directory, "--decode-max-num-seqs", "3").start(apart=apart) as system:
        async with aiohttp.ClientSession() as session:
            alone = [
                await complete(session, system.url, text, **fields) for text, fields in zip(texts, patient, strict=True)
            ]
            running = [Completion() for _ in texts]

            async def ask(name: str, prompt: list[int], into: Completion, fields: dict[str, Any]) -> None:
                await complete(session, system.url, prompt, into, **fields)
                ended.append(name)

            system.holds.texts.set(6)  # of the patient ones; who has less gets on
            tasks = [asyncio.create_task(ask("patient", *each)) for each in zip(texts, running, patient, strict=True)]
            await have_begun(running, 4)
            at_once = [Completion() for _ in range(3)]
            fields = {"max_tokens": 20, "priority": 0, "ignore_eos": True}
            tasks += [asyncio.create_task(ask("urgent", urgent, into, fields)) for into in at_once]
            await have_begun(at_once, 2)
            system.release()
            await asyncio.gather(*tasks[3:])
            assert ended == ["urgent"] * 3
            await asyncio.gather(*tasks)
    assert [completion.text for completion in running] == [completion.text for completion in alone]
    assert len({completion.text for completion in at_once}) == 1 and at_once[0].num_tokens == 20
