"""Cells and lines of tables: a cell is a row of results.csv, perhaps beside another system's row."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from deploy.bench.origin import ROOT
from deploy.bench.results import CONDITIONS, Row, read_rows

ONE_GPU, TWO_GPUS, FOUR_GPUS = "NVIDIA H200", "2 x NVIDIA H200", "4 x NVIDIA H200"
SMALL_GPU = "24 GB of an NVIDIA H200"
H100 = "NVIDIA H100 80GB HBM3"
MODEL = "qwen3-4b"
RESULTS = ROOT / "benchmarks" / "results.csv"
SAME = (*(name for name in CONDITIONS if name not in ("date", "command")), "figure")
"""Fields that runs to be merged have in common; commands may differ by a seed."""


Spread = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """A row's figure, and perhaps a figure to compare with; of several runs the medians, and the least and the most.

    Without `close` the better figure is bold. With `close`, `other` is an estimate, in bold if off by more. `rival` is
    the other figure's row if that is another run.
    """

    row: Row
    value: float
    other: float | None = None
    close: float | None = None
    spread: Spread | None = None
    other_spread: Spread | None = None
    rival: Row | None = None


Line = tuple[str, list[Cell | None]]


@dataclass(frozen=True, slots=True)
class TableData:
    """Content of a table; `subject` is the common setup of all measurements.

    With `results`, the path of results.csv from the page, each label links the run of its first figure.
    """

    subject: str
    corner: str
    columns: list[str]
    lines: list[Line]
    results: str = ""


def results(path: Path = RESULTS) -> list[Row]:
    """Return the rows of a file of results, runs under equal conditions merged."""
    return merged(read_rows(path))


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return one row for all runs of a figure under equal conditions, with the medians, at the place of the last."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in SAME)
        found[key] = [*found.pop(key, []), row]
    return [_median(runs) if len(runs) > 1 else runs[0] for runs in found.values()]


def _median(runs: Sequence[Row]) -> Row:
    values, others = ([value for value in found if not math.isnan(value)]
                      for found in ([row.value for row in runs], [row.compared_value for row in runs]))  # fmt: skip
    return replace(
        runs[-1],
        value=median(values) if values else math.nan,
        compared_value=median(others) if others else math.nan,
        runs=tuple(runs),
    )


def newest(
    rows: Sequence[Row], hardware: str, system: str, load: str, figure: str, *, model: str = MODEL, beside: str = ""
) -> Cell | None:
    """Return the last row of a load; with `beside`, the last row compared with a system of such a name."""
    for row in reversed(rows):
        same = (row.hardware, row.system, row.model, row.figure) == (hardware, system, model, figure)
        in_company = row.compared_with.startswith(beside) if beside else not row.compared_with
        if same and in_company and row.workload.startswith(load):
            return both(row) if beside else own(row)
    return None


def own(row: Row) -> Cell:
    """Make a cell of a row's figure."""
    return Cell(row, row.value, spread=_spread(each.value for each in row.runs))


def other(row: Row) -> Cell:
    """Make a cell of the figure that a row's figure is compared with."""
    return Cell(row, row.compared_value, spread=_spread(each.compared_value for each in row.runs))


def both(row: Row) -> Cell:
    """Make a cell of a row's two figures."""
    return replace(own(row), other=row.compared_value, other_spread=other(row).spread)


def _spread(values: Iterable[float]) -> Spread | None:
    """Return the least and the most; None for a single run."""
    found = [value for value in values if not math.isnan(value)]
    return (min(found), max(found)) if found else None


def present(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with some measured cell."""
    return [(label, cells) for label, cells in lines if any(cells)]
