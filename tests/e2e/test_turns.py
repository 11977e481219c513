"""Streams wait for prompts in turns, say what they would say otherwise, and wait for no worker that hangs."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.system import System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
NUM_OUT, LONG_OUT = 20, 300


class TurningSystem(System):
    """Its workers take turns, with steps that are told to take 600 ms."""

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        role = "decode" if "decode" in name else "prefill"
        super().start_worker(name, *flags, module=module or f"tests.e2e.turning_{role}")

    def num_turns(self, name: str) -> float:
        begin, end = "baton_worker_turns_total{", f'worker="{name}"}}'
        told = [line.split() for line in self.text("/metrics").splitlines() if line.startswith(begin)]
        return sum(float(value) for of, value in told if of.endswith(end))


async def test_texts_in_turns_and_beside_a_prefill_worker_that_hangs_in_its_turn(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference = Reference(directory, model)
    asked, longs = prompts(3, 5, 30, seed=71), prompts(12, 280, 310, seed=72)
    streams, late = [Completion() for _ in asked], [Completion() for _ in longs]
    with TurningSystem(directory, "--net-worker-timeout-s", "60", "--net-heartbeat-s", "0.02").start() as system:
        first = asyncio.create_task(complete_all(system.url, asked, streams, max_tokens=LONG_OUT, ignore_eos=True))
        await asyncio.to_thread(system.until, lambda: all(stream.num_tokens > 3 for stream in streams))
        others = asyncio.create_task(complete_all(system.url, longs, late, max_tokens=NUM_OUT, ignore_eos=True))
        await asyncio.to_thread(
            system.until, lambda: system.num_turns("prefill-0") > 1 and system.num_turns("decode-0") > 1
        )
        system.processes["prefill-0"].send_signal(signal.SIGSTOP)
        await first  # no later than their claim, though nobody takes the hanging worker for dead
        system.processes["prefill-0"].send_signal(signal.SIGCONT)
        await others
    assert [stream.text for stream in streams] == [reference.text(each, LONG_OUT, ignore_eos=True) for each in asked]
    assert [stream.text for stream in late] == [reference.text(each, NUM_OUT, ignore_eos=True) for each in longs]
