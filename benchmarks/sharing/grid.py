"""Cells of `benchmarks.sharing`: which steps run beside which, and the result rows of their times. Without torch.

A cell is measured by two processes: one runs decode steps, the other prompt steps, or one of them alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import mean, median

from common.base.percentiles import percentile
from deploy.bench.results import Row, row_of
from deploy.bench.stats import Figure

CONTEXT = 1024
"""Tokens of each decode row, and of each prompt in a step of several, unless told."""
MIN_STEPS = 3
"""Least steps of which a median is worth a row."""
ALONE = "alone"


class Kind(Enum):
    """Meeting of the steps of a cell."""

    BESIDE = "beside"  # both all the time, or one alone
    TURNS = "turns"  # a prompt step on the whole GPU, then a decode step, one after the other
    SWITCH = "switch"  # prompt steps alone, in turn on the share and on the whole GPU


@dataclass(frozen=True, slots=True)
class Cell:
    """Steps to measure: decode steps of `num_rows`, prompt steps of `num_tokens`; 0 is none of the kind."""

    num_rows: int
    num_tokens: int
    num_left: int = 0  # multiprocessors left to decode steps; 0: the prompt has the whole GPU
    kind: Kind = Kind.BESIDE
    context: int = CONTEXT

    @property
    def window_s(self) -> float:
        """Time to measure, so that a window has some of the longest steps."""
        return 0.5 + self.num_tokens / 8000

    @property
    def workload(self) -> str:
        rows = f"{self.num_rows} rows of {self.context}"
        prompts = f"prompt steps of {self.num_tokens} tokens"
        left = f"{self.num_left} multiprocessors left" if self.num_left else "whole GPU"
        if self.kind is Kind.TURNS:
            return f"sharing, {rows} and {prompts} in turns"
        if self.kind is Kind.SWITCH:
            return f"sharing, {prompts} in turn on the whole GPU and with {left}"
        if not self.num_tokens:
            return f"sharing, {rows} alone"
        return f"sharing, {prompts} alone, {left}" if not self.num_rows else f"sharing, {rows} beside {prompts}, {left}"


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds between the ends of steps, in order; empty for a side without steps."""

    decode: Sequence[float] = ()
    prompt: Sequence[float] = ()

    def of(self, cell: Cell) -> list[Sequence[float]]:
        """Return the times of the sides that have steps in the cell."""
        pairs = (cell.num_rows, self.decode), (cell.num_tokens, self.prompt)
        return [values for count, values in pairs if count]


def grid(rows: Sequence[int], tokens: Sequence[int], lefts: Sequence[int], context: int = CONTEXT) -> list[Cell]:
    """Return all cells, those that others are compared with first, then share by share."""
    cells = [Cell(num_rows, 0) for num_rows in rows]
    cells += [Cell(0, num_tokens, num_left) for num_left in lefts for num_tokens in tokens]
    cells += [Cell(num_rows, num_tokens, kind=Kind.TURNS) for num_rows in rows for num_tokens in tokens]
    cells += [Cell(0, min(tokens), num_left, Kind.SWITCH) for num_left in lefts if num_left]
    cells += [Cell(num_rows, num_tokens, left) for left in lefts for num_rows in rows for num_tokens in tokens]
    return [replace(cell, context=context) for cell in cells]


def figures(cell: Cell, times: Times, measured: Mapping[Cell, Times]) -> Iterator[tuple[Figure, float | None]]:
    """Yield the figures of a cell, each with that of the same steps alone if `measured` has it.

    A turn's and a switch's cost is the time beyond the steps themselves; without steps alone there is none.
    """

    def alone(num_rows: int, num_tokens: int, num_left: int) -> Times:
        return measured.get(Cell(num_rows, num_tokens, num_left, context=cell.context), Times())

    decode_ms = _middle(alone(cell.num_rows, 0, 0).decode)
    prompt_ms = _middle(alone(0, cell.num_tokens, cell.num_left).prompt)
    if cell.kind is Kind.BESIDE:
        lone = alone(0, cell.num_tokens, cell.num_left)
        both = cell.num_rows > 0 and cell.num_tokens > 0
        sides = ("decode", times.decode, alone(cell.num_rows, 0, 0).decode), ("prompt", times.prompt, lone.prompt)
        for name, values, lone_values in sides:
            for point in (50, 99) if values else ():
                other = percentile(lone_values, point) if both and lone_values else None
                yield Figure(f"{name}_step_p{point}", percentile(values, point), "ms"), other
    elif cell.kind is Kind.TURNS and times.decode:
        yield Figure("turn", median(times.decode), "ms"), None
        if decode_ms is not None and prompt_ms is not None:
            yield Figure("turn_cost", median(times.decode) - decode_ms - prompt_ms, "ms"), None
    elif cell.kind is Kind.SWITCH and times.prompt:
        whole_ms = _middle(alone(0, cell.num_tokens, 0).prompt)
        if whole_ms is not None and prompt_ms is not None:
            yield Figure("switch_cost", mean(times.prompt) - (whole_ms + prompt_ms) / 2, "ms"), None


def rows_of(hardware: str, model: str, measured: Mapping[Cell, Times]) -> list[Row]:
    """Return the result rows of all measured cells."""
    return [
        row_of(hardware, model, cell.workload, figure, beside=None if alone is None else (ALONE, alone))
        for cell, times in measured.items()
        for figure, alone in figures(cell, times, measured)
    ]


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None
