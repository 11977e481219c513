"""Layout of a table in Markdown: cells, and the lines below that say where the figures are from."""

import math
from collections.abc import Iterable, Sequence

from benchmarks.tables.cells import Cell, Spread, TableData


def render(data: TableData) -> str:
    """Return Markdown of a table and the line below."""
    if not data.lines:
        return f"Not measured yet ({data.subject}).\n"
    lines = [_line([data.corner, *data.columns]), "|" + "---|" * (1 + len(data.columns))]
    lines += [_line([_label(label, cells, data.results), *map(_shown, cells)]) for label, cells in data.lines]
    return "\n".join(lines) + f"\n\n{_origin(data)}\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _label(label: str, cells: Sequence[Cell | None], results: str) -> str:
    line = next((cell.row.line for cell in cells if cell), 0)
    return f"[{label}]({results}#L{line})" if results else label


def _shown(cell: Cell | None) -> str:
    """Return a figure, or two with the better in bold unless their ranges meet; an estimate is bold if too far off."""
    if cell is None:
        return ""
    own = _figure(cell.value, cell.spread, cell.row.unit)
    if cell.other is None:
        return own
    other = _figure(cell.other, cell.other_spread, cell.row.unit)
    if cell.close is not None:
        return f"{own} · {other}" if abs(cell.other / cell.value - 1) <= cell.close else f"{own} · **{other}**"
    least, most = cell.spread or (cell.value, cell.value)
    other_least, other_most = cell.other_spread or (cell.other, cell.other)
    if math.isnan(cell.value + cell.other) or (least <= other_most and other_least <= most):
        return f"{own} · {other}"
    is_more_better = cell.row.unit.endswith("/s") or cell.row.figure == "hit_rate"
    is_better = (cell.value > cell.other) == is_more_better
    return f"**{own}** · {other}" if is_better else f"{own} · **{other}**"


def _figure(value: float, spread: Spread | None, unit: str) -> str:
    """Return a figure, with the least and the most of several runs."""
    if spread is None:
        return _number(value, unit)
    return f"{_number(value, unit)} ({'-'.join(_number(end, unit) for end in spread)})"


def _number(value: float, unit: str) -> str:
    """Return three significant digits, or all before the point, or a dash; titles of columns name milliseconds."""
    if math.isnan(value):
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{' s' if unit == 's' else ''}"


def _origin(data: TableData) -> str:
    """Return days and commits of the rows, newest last, the number of runs, and how servers were started."""
    cells = [cell for _, found in data.lines for cell in found if cell]
    days: dict[str, list[str]] = {}
    for date, commit in sorted({(cell.row.date, cell.row.commit) for cell in cells}):
        days.setdefault(date, []).append(commit)
    said = "; ".join(f"{date}, commit {' and '.join(commits)}" for date, commits in days.items())
    return "\n".join([f"({data.subject}; {said}; {_runs(cells)})", *_starts(cells)])


def _runs(cells: Sequence[Cell]) -> str:
    """Tell of how many runs each figure is."""
    rows = [row for cell in cells for row in (cell.row, cell.rival) if row]
    counts = sorted({max(1, len(row.runs)) for row in rows})
    if counts == [1]:
        return "one run each"
    several = [str(count) for count in counts if count > 1]
    alone = ", one run where there is no range" if counts[0] == 1 else ""
    return f"median (least-most) of {' or '.join(several)} runs{alone}"


def _starts(cells: Sequence[Cell]) -> list[str]:
    """Tell the commands that started servers, and the commits of rows that lack the other server's."""
    known: dict[tuple[str, str], dict[str, None]] = {}
    unknown: dict[str, dict[str, None]] = {}
    for cell in cells:
        row, other = cell.row, cell.rival
        started = [(row.system, row.started_by)]
        if other:
            started.append((other.system, other.started_by))
        elif cell.other is not None and cell.close is None:
            started.append((row.compared_with, row.compared_started_by))
        for system, command in started:
            if command:
                known.setdefault((system, command), {})[row.commit] = None
            elif not system.startswith("baton"):
                unknown.setdefault(system, {})[row.commit] = None
    lines = [
        f"{_name(system)}, commit {' and '.join(commits)}: `{command}`." for (system, command), commits in known.items()
    ]
    lines += [
        f"How {_name(system)} was started is not in the rows of commit {' and '.join(commits)}."
        for system, commits in unknown.items()
    ]
    return ["", *lines] if lines else []


def _name(system: str) -> str:
    return system.replace("vllm", "vLLM").replace("baton", "Baton")
