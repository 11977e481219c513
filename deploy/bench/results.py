"""Results as runs, a line of JSON each; benchmarks/README.md documents the fields."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from deploy.bench.origin import command_line, commit, stack, today
from deploy.bench.stats import Figure

Value = float | None | tuple[float | None, float | None]
"""A figure, or a figure and the other system's; None where a system has none."""


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A workload on a system, perhaps beside another; `figures` has values by name, by unit."""

    date: str
    commit: str
    hardware: str
    stack: str = ""
    system: str
    started_by: str = ""
    compared_with: str = ""
    compared_started_by: str = ""
    model: str
    workload: str
    command: str
    figures: dict[str, dict[str, Value]]


CONDITIONS = tuple(name for name in Run.__struct_fields__ if name != "figures")
SAME = (*(name for name in CONDITIONS if name not in ("date", "command")), "figure")
"""Fields that runs to be merged have in common; commands may differ by a seed."""
_lines = msgspec.json.Decoder(Run)


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
    """Add a line for each run of the rows; raises ValueError if the file's first line is no run."""
    if path.exists():
        with path.open("rb") as file:
            if first := file.readline():
                _run(path, 1, first)
    figures: dict[tuple[str, ...], dict[str, dict[str, Value]]] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in CONDITIONS)
        figures.setdefault(key, {}).setdefault(row.unit, {})[row.figure] = _value(row)
    runs = [Run(**dict(zip(CONDITIONS, key, strict=True)), figures=found) for key, found in figures.items()]
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(run) + b"\n" for run in runs)


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


def read_rows(path: Path) -> list[Row]:
    """Return the rows of all runs in the file's order; raises ValueError for a line that is no run."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        run = _run(path, number, line)
        conditions = {name: getattr(run, name) for name in CONDITIONS}
        for unit, figures in run.figures.items():
            for figure, value in figures.items():
                own, other = value if isinstance(value, tuple) else (value, None)
                rows.append(
                    Row(
                        **conditions,
                        figure=figure,
                        value=math.nan if own is None else own,
                        unit=unit,
                        compared_value=math.nan if other is None else other,
                        line=number,
                    )
                )
    return rows


def _run(path: Path, number: int, line: bytes) -> Run:
    try:
        return _lines.decode(line)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}, line {number} is no run: {error}") from None


def _value(row: Row) -> Value:
    own = _rounded(row.value)
    return (own, _rounded(row.compared_value)) if row.compared_with else own


def _rounded(value: float) -> float | None:
    """Return six significant digits, without a point where there are no more."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
