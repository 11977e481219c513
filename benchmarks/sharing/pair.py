"""Both processes of the benchmark, a cell after the other: a cell that hangs or fails is left out, and all goes on."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.own_memory import LINGER_S
from benchmarks.sharing.grid import MIN_STEPS, Cell, Times
from common.base.errors import BatonError
from deploy.bench.origin import ROOT

START_S, PREPARE_S, CELL_S = 150.0, 60.0, 15.0
"""Deadlines: of a process until it is ready, of the preparation of a cell, and of its answer after the window."""
SETTLE_S, LEAD_S = 0.2, 0.05
"""Time of a window that counts for nothing, and time until it begins."""
END_S = 5.0
MIN_LEFT_S = 30.0
"""Time that a new start must leave for cells."""


class CellFailed(BatonError):
    """A process failed, or gave no answer in time."""


class Process:
    """A side of the benchmark: `benchmarks.sharing_side`, by lines of JSON."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._unread = b""

    def send(self, told: Mapping[str, Any]) -> None:
        """Send a line; a process that has ended is noticed by `receive`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(told).encode() + b"\n")

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """Return the next answer; raises CellFailed for an error, the process's end, or after `deadline_s` seconds."""
        assert self.process.stdout is not None
        end_s = time.monotonic() + deadline_s
        while b"\n" not in self._unread:
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                raise CellFailed(f"no answer within {deadline_s:g} s")
            if not (piece := os.read(self.process.stdout.fileno(), 1 << 20)):
                raise CellFailed(f"its process ended with status {self.process.wait()}")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CellFailed(answer["error"])
        return answer

    def end(self) -> None:
        """End the process; a hung one is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Pair:
    """Both processes, from their start until the end of the context.

    Args:
        commands: of the decode and the prompt process.
        page: the file in memory that tells whose turn it is.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environs: Mapping[str, Mapping[str, str]], page: Path):
        self._page = page
        self.sides = {name: Process(command, environs[name]) for name, command in commands.items()}

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for side in self.sides.values():
            side.end()

    def await_start(self, deadline_s: float) -> None:
        for side in self.sides.values():
            side.receive(deadline_s)

    def measure(self, cell: Cell, end_s: float) -> Times | None:
        """Return times, or None if the steps do not fit; raises CellFailed, soon after `end_s` at the latest."""
        self._page.write_bytes(b"\0")
        counts = {"decode": cell.num_rows, "prompt": cell.num_tokens}
        sides = {name: side for name, side in self.sides.items() if counts[name]}
        told = {"rows": cell.num_rows, "tokens": cell.num_tokens, "left": cell.num_left, "kind": cell.kind.value,
                "context": cell.context}  # fmt: skip
        for side in sides.values():
            side.send(told)
        fit = {
            name: side.receive(min(PREPARE_S, end_s + CELL_S - time.monotonic()))["ready"]
            for name, side in sides.items()
        }
        begin_s = time.monotonic() + LEAD_S + SETTLE_S
        window = {"begin_s": begin_s, "end_s": begin_s + cell.window_s if all(fit.values()) else 0.0}
        for name, side in sides.items():
            if fit[name]:
                side.send(window)
        deadline_s = LEAD_S + SETTLE_S + cell.window_s + CELL_S
        times = {name: side.receive(deadline_s)["ms"] for name, side in sides.items() if fit[name]}
        return Times(**times) if all(fit.values()) else None


class Bench:
    """Measures cells one after the other; `problems` has those left out, with the reasons.

    Args:
        begin: starts both processes.
        end_s: end of all, on the monotonic clock.
        linger_s: time until the memory of killed processes is free.
    """

    def __init__(self, begin: Callable[[], Pair], end_s: float, linger_s: float = LINGER_S + 2.0) -> None:
        self._begin, self._end_s, self._linger_s = begin, end_s, linger_s
        self.measured: dict[Cell, Times] = {}
        self.problems: dict[Cell, str] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure `cells`, with new processes after each failure, until the time is over."""
        left = list(cells)
        while left and time.monotonic() + (MIN_LEFT_S if self.problems else 0.0) < self._end_s:
            with self._begin() as pair:
                try:
                    pair.await_start(min(START_S, self._end_s - time.monotonic()))
                except CellFailed as error:
                    self.problems |= dict.fromkeys(left, f"the processes did not start: {error}")
                    return
                self._measure(pair, left)
            if left:
                time.sleep(min(self._linger_s, max(0.0, self._end_s - time.monotonic())))
        self.problems |= dict.fromkeys(left, "the time was over")

    def _measure(self, pair: Pair, left: list[Cell]) -> None:
        """Take cells off `left` until one fails or the time is over."""
        while left and time.monotonic() < self._end_s:
            cell = left.pop(0)
            try:
                times = pair.measure(cell, self._end_s)
            except CellFailed as error:
                self.problems[cell] = str(error)
                return
            if times is None:
                self.problems[cell] = "does not fit"
            elif min(len(values) for values in times.of(cell)) < MIN_STEPS:
                self.problems[cell] = f"fewer than {MIN_STEPS} steps in {cell.window_s:.1f} s"
            else:
                self.measured[cell] = times
