"""Cells and lines of tables: a cell is a row of results.csv, perhaps beside another system's row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.bench.results import Row

ONE_GPU, TWO_GPUS, FOUR_GPUS = "NVIDIA H200", "2 x NVIDIA H200", "4 x NVIDIA H200"
SMALL_GPU = "24 GB of an NVIDIA H200"
H100 = "NVIDIA H100 80GB HBM3"
MODEL = "qwen3-4b"


@dataclass(frozen=True, slots=True)
class Cell:
    """A row's figure, and perhaps a figure to compare with.

    Without `close` the better figure is bold. With `close`, `other` is an estimate, in bold if off by more.
    """

    row: Row
    value: float
    other: float | None = None
    close: float | None = None


Line = tuple[str, list[Cell | None]]


@dataclass(frozen=True, slots=True)
class TableData:
    """Content of a table; `subject` is the common setup of all measurements."""

    subject: str
    corner: str
    columns: list[str]
    lines: list[Line]


def newest(
    rows: Sequence[Row], hardware: str, system: str, load: str, figure: str, *, model: str = MODEL, beside: str = ""
) -> Cell | None:
    """Return the last row of a load; with `beside`, the last row compared with a system of such a name."""
    for row in reversed(rows):
        same = (row.hardware, row.system, row.model, row.figure) == (hardware, system, model, figure)
        in_company = row.compared_with.startswith(beside) if beside else not row.compared_with
        if same and in_company and row.workload.startswith(load):
            return Cell(row, float(row.value), float(row.compared_value) if beside else None)
    return None


def present(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with some measured cell."""
    return [(label, cells) for label, cells in lines if any(cells)]
