"""Results as rows of a CSV file, a run each; benchmarks/README.md documents the columns."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.bench.origin import command_line, commit, stack, today
from deploy.bench.stats import Figure

CONDITIONS = (
    "date", "commit", "hardware", "stack", "system", "started_by", "compared_with", "compared_started_by", "model",
    "workload", "command",
)  # fmt: skip
"""Columns of a run, before its figures; a workload on a system, perhaps beside another."""
HEADER = [*CONDITIONS, "figures"]
FIGURE = re.compile(r"(?P<name>[^=;]+)=(?P<value>[^|; ]+)(?:\|(?P<other>[^; ]+))?(?: (?P<unit>[^;]+))?")
"""A figure and its unit, perhaps with the other system's between them: `ttft_p50=18.2|30.3 ms`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a run; `compared_with` names another system, and `compared_value` is its figure.

    NaN is a figure that a system has not. `line` is the run's place in its file, from 1. `runs` are the rows whose
    medians the values are, if several.
    """

    date: str
    commit: str
    hardware: str
    stack: str
    system: str
    model: str
    workload: str
    figure: str
    value: float
    unit: str
    compared_with: str = ""
    compared_value: float = math.nan
    command: str = ""
    started_by: str = ""
    compared_started_by: str = ""
    line: int = field(default=0, compare=False)
    runs: tuple["Row", ...] = ()


def row_of(
    hardware: str, model: str, workload: str, figure: Figure, *,
    system: str = "baton", beside: tuple[str, float] | None = None, started: tuple[str, str] = ("", ""),
) -> Row:  # fmt: skip
    """Make a row of a figure with day, commit and command of the run.

    `beside` is another system and its figure; `started` are the commands that started the server and the other.
    """
    return Row(
        date=today(),
        commit=commit(),
        hardware=hardware,
        stack=stack(),
        system=system,
        model=model,
        workload=workload,
        figure=figure.name,
        value=figure.value,
        unit=figure.unit,
        compared_with=beside[0] if beside else "",
        compared_value=beside[1] if beside else math.nan,
        command=command_line(),
        started_by=started[0],
        compared_started_by=started[1],
    )


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add a line for each run of the rows; raises ValueError if the file has other columns."""
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        with path.open(encoding="utf-8", newline="") as file:
            _check_header(path, next(csv.reader(file)))
    runs: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        runs.setdefault(tuple(getattr(row, name) for name in CONDITIONS), []).append(_written(row))
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(HEADER)
        writer.writerows([*conditions, "; ".join(figures)] for conditions, figures in runs.items())


def read_rows(path: Path) -> list[Row]:
    """Return the rows of all runs in the file's order; raises ValueError for a line that is no run."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        _check_header(path, next(lines, []))
        for values in lines:
            if len(values) != len(HEADER):
                raise ValueError(f"{path}, line {lines.line_num} has {len(values)} columns, {len(HEADER)} are needed")
            *conditions, figures = values
            for written in figures.split("; "):
                if (found := FIGURE.fullmatch(written)) is None:
                    raise ValueError(f"{path}, line {lines.line_num}: {written!r} is no figure, such as 'rate=5.2 ms'")
                rows.append(
                    Row(
                        **dict(zip(CONDITIONS, conditions, strict=True)),  # type: ignore[arg-type]
                        figure=found["name"],
                        value=_number(found["value"]),
                        unit=found["unit"] or "",
                        compared_value=_number(found["other"] or "nan"),
                        line=lines.line_num,
                    )
                )
    return rows


def _check_header(path: Path, header: list[str]) -> None:
    if header != HEADER:
        raise ValueError(f"{path} has the columns {','.join(header)}, not {','.join(HEADER)}: name another file")


def _number(text: str) -> float:
    return math.nan if text == "nan" else float(text)


def _written(row: Row) -> str:
    other = f"|{row.compared_value:.6g}" if row.compared_with else ""
    return f"{row.figure}={row.value:.6g}{other} {row.unit}".rstrip()
