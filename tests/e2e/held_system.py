"""A system that a test can hold half way; see `tests.e2e.hold`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.client import Completion, complete_all
from tests.e2e.hold import Holds
from tests.e2e.system import System

FEW = 3
"""Tokens of a text that has begun: the first is of its prompt, the next of the worker that decodes it."""


class HeldSystem(System):
    """Its workers heed `holds`, which a test sets before what it wants to meet half way."""

    def __init__(self, model: Path, *flags: str, device: str = "cpu", router_flags: Sequence[str] = ()) -> None:
        super().__init__(model, *flags, device=device, router_flags=router_flags)
        self.holds = Holds(Path(self.directory.name))

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        super().start_worker(name, *flags, module=module or f"tests.e2e.held_{name.split('-')[0]}")

    def start_with_faulty(self) -> None:
        """Two decode workers; the device of the second meets a fault where `holds.faults` says so."""
        self.start_router()
        self.start_memory()
        for name in ("prefill-0", "decode-0"):
            self.start_worker(name)
        self.start_worker("decode-1", module="tests.e2e.faulty_decode")
        self.wait_ready(1, 2)

    def release(self) -> None:
        """Everybody goes on."""
        self.holds.texts.release()
        self.holds.prompt_steps.release()
        self.holds.retrievals.release()


async def begun(task: "asyncio.Task[Any]", streams: list[Completion], num_tokens: int = FEW) -> None:
    """Until each of the streams of a task has that much."""
    while min(stream.num_tokens for stream in streams) < num_tokens:
        assert not task.done(), f"over before it was to begin: {streams}"
        await asyncio.sleep(0.005)


async def held_while_streaming(
    system: HeldSystem, asked: list[list[int]], max_tokens: int, **fields: Any
) -> "asyncio.Task[list[Completion]]":
    """Streams that have begun and do not get on before the system is released."""
    streams = [Completion() for _ in asked]
    fields |= {"max_tokens": max_tokens, "ignore_eos": True}
    system.holds.texts.set(FEW)
    task = asyncio.create_task(complete_all(system.url, asked, streams, **fields))
    await begun(task, streams)
    return task


async def killed_while_streaming(
    system: HeldSystem, victim: str, asked: list[list[int]], max_tokens: int, **fields: Any
) -> list[str]:
    """The texts of streams during which `victim` is killed, once each of them has begun and before any has ended."""
    task = await held_while_streaming(system, asked, max_tokens, **fields)
    await asyncio.to_thread(system.kill, victim)
    system.release()
    completions = await task
    assert [c.error for c in completions] == [None] * len(asked)
    assert [c.usage["completion_tokens"] for c in completions] == [max_tokens] * len(asked)
    return [c.text for c in completions]
