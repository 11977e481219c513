"""A process of `benchmarks.sharing`: decode steps, or prompt steps, told by lines of JSON on stdin.

    python -m benchmarks.sharing.side decode|prompt MODEL_DIR DEVICE ROWS TOKENS CONTEXT PAGE

The arguments tell of all cells to come. PAGE is a file of a byte for turns. For each line with a cell the process
prepares and answers `ready`. For the next line, with the window on the monotonic clock, it runs steps and
answers their milliseconds. An error is the last answer. Engine, batch, graphs and shares are the workers' own.
"""

import argparse
import json
import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.decode_step import MORE_TOKENS, StepBench
from benchmarks.own_memory import own_memory
from benchmarks.prompt_step import PromptBench, Together
from benchmarks.sharing.grid import Cell, Kind
from benchmarks.sharing.pools import Pools, pools, prompts_of
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.row_state import HEADS
from common.kernels.base.gpu import gpu_of
from common.memory.client.client import MemoryClient
from common.models.reading import AS_STORED, KEEP
from deploy.bench.workload import numbers

IN_FLIGHT = 2
"""As in workers: a step runs and a step is queued."""
LOOK_S = 20e-6

Launch = Callable[[], Callable[[], object]]
"""Launches a step; the returned function waits for its end."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Asked:
    """All cells to come, by what they have."""

    rows: list[int]
    tokens: list[int]
    context: int

    def pools(self, model_dir: str, device: str) -> Pools:
        return pools(model_dir, torch.device(device), self.rows, self.tokens, self.context)


class Page:
    """A byte in memory of both processes: whose turn it is."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 1)

    @property
    def turn(self) -> int:
        return self._memory[0]

    def give(self, turn: int) -> None:
        self._memory[0] = turn


def all_the_time(launch: Launch, begin_s: float, end_s: float, clock: Clock = time.monotonic) -> list[float]:
    """Run steps until the window ends, and return the milliseconds between ends of steps inside the window."""
    waits, ends_s = deque(launch() for _ in range(IN_FLIGHT)), list[float]()
    while (now_s := clock()) < end_s:
        waits.popleft()()
        ends_s += [clock()] if now_s >= begin_s else []
        waits.append(launch())
    for wait in waits:
        wait()
    return _between(ends_s)


def in_turns(
    launch: Launch, begin_s: float, end_s: float, page: Page, turn: int, clock: Clock = time.monotonic
) -> list[float]:
    """Run a step whenever the page says so, and give the turn to the other side; see `all_the_time`."""
    ends_s = list[float]()
    while (now_s := clock()) < end_s:
        if page.turn != turn:
            time.sleep(LOOK_S)
            continue
        launch()()
        page.give(1 - turn)
        ends_s += [clock()] if now_s >= begin_s else []
    return _between(ends_s)


def _between(ends_s: list[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in pairwise(ends_s)]


class Side(ABC):
    """Steps of a kind on the device."""

    turn: int
    """The page's byte while this side may run."""

    @abstractmethod
    def prepare(self, cell: Cell) -> Launch | None:
        """Return the launch of the cell's steps, or None if they do not fit."""


class DecodeSide(Side):
    """Decode steps over rows of equal contexts, rewound before contexts outgrow their blocks."""

    turn = 1

    def __init__(self, model_dir: str, device: str, asked: Asked, memory: MemoryClient) -> None:
        args = argparse.Namespace(
            model_dir=model_dir, batches=asked.rows, quantization=AS_STORED, head=KEEP, kv_dtype="auto", no_pdl=False,
            cublas=False,
        )  # fmt: skip
        self.bench = StepBench(args, memory, device, asked.pools(model_dir, device).decode)
        state = self.bench.batch.state
        self._heads = state.words[: len(HEADS) * state.column_words]  # what steps advance
        self._num_filled, self._filled, self._numbers = 0, self._heads, count(1)

    def prepare(self, cell: Cell) -> Launch | None:
        if cell.num_rows != self._num_filled:
            if not self.bench.fill([cell.context] * cell.num_rows):
                return None
            self._num_filled, self._filled = cell.num_rows, self._heads.clone()
        return partial(self._launch, cell.num_rows)

    def _launch(self, num_rows: int) -> Callable[[], object]:
        if next(self._numbers) % (MORE_TOKENS - IN_FLIGHT) == 0:
            self._heads.copy_(self._filled)  # in stream order, between two steps
        return self.bench.launch(num_rows).output


class PromptSide(Side):
    """Prompt steps on a share, with a runner for each share."""

    turn = 0

    def __init__(self, model_dir: str, device: str, asked: Asked, memory: MemoryClient) -> None:
        num_tokens, pool_bytes = max(asked.tokens), asked.pools(model_dir, device).prompt
        num_prompts = prompts_of(num_tokens, asked.context).number
        self.bench = PromptBench(model_dir, num_tokens, memory, device, num_prompts, pool_bytes=pool_bytes)
        self._runners: dict[int, PromptRunner] = {}
        self._numbers = count()

    def prepare(self, cell: Cell) -> Launch | None:
        runner = self._runner(0 if cell.kind is Kind.TURNS else cell.num_left)
        num_prompts = max(1, cell.num_tokens // cell.context)
        if not self.bench.fits(cell.num_tokens // num_prompts):
            return None
        chunks = self.bench.together(Together(num_prompts, cell.num_tokens // num_prompts, 0))
        return partial(self._launch, runner, chunks, cell)

    def _runner(self, num_left: int) -> PromptRunner:
        if num_left not in self._runners:
            self._runners[num_left] = self.bench.runner(self._percent(num_left))
        return self._runners[num_left]

    def _percent(self, num_left: int) -> int:
        """Return the least percent of the share that leaves so many multiprocessors."""
        if not num_left or self.bench.engine.device.type == "cpu":
            return 100
        num_sms = gpu_of(self.bench.engine.device).num_sms
        return -(-100 * (num_sms - num_left) // num_sms)

    def _launch(self, runner: PromptRunner, chunks: list[PromptChunk], cell: Cell) -> Callable[[], object]:
        is_switch = cell.kind is Kind.SWITCH and next(self._numbers) % 2 == 0
        return runner.launch(chunks, whole_gpu=not cell.num_left or is_switch).tokens


SIDES: dict[str, Callable[[str, str, Asked, MemoryClient], Side]] = {"decode": DecodeSide, "prompt": PromptSide}


def serve(side: Side, page: Page, asked: TextIO, answers: TextIO) -> None:
    """Answer lines until the end of `asked`."""

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=answers, flush=True)

    answer({"ready": True})
    for line in asked:
        told = json.loads(line)
        cell = Cell(told["rows"], told["tokens"], told["left"], Kind(told["kind"]), told["context"])
        launch = side.prepare(cell)
        if launch is not None:
            for _ in range(IN_FLIGHT):
                launch()()
        answer({"ready": launch is not None})
        if launch is None:
            continue
        window = json.loads(asked.readline())
        if cell.kind is Kind.TURNS:
            answer({"ms": in_turns(launch, window["begin_s"], window["end_s"], page, side.turn)})
        else:
            answer({"ms": all_the_time(launch, window["begin_s"], window["end_s"])})


@contextmanager
def answers_only() -> Iterator[TextIO]:
    """Yield the stdout for answers; all other output goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def main(role: str, model_dir: str, device: str, rows: str, tokens: str, context: str, page: str) -> int:
    with answers_only() as answers:
        try:
            with own_memory(device) as memory:
                asked = Asked(numbers(rows), numbers(tokens), int(context))
                serve(SIDES[role](model_dir, device, asked, memory), Page(Path(page)), sys.stdin, answers)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
