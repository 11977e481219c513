"""Writes the tables of README.md and benchmarks/README.md from results.csv, each between two markers.

    python -m benchmarks.tables            # Write the tables.
    python -m benchmarks.tables --check    # Exit with status 1 if a table is out of date.

A cell is the newest row of its hardware, system and load. Under each table stand the days and commits of its rows.
`table_data` defines the content; `tables` does only the layout.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.table_cells import Cell, TableData
from benchmarks.table_data import TABLES
from deploy.bench.results import ROOT, Row, read_rows

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def render(data: TableData) -> str:
    """Return a table and the line below, in Markdown."""
    if not data.lines:
        return f"Not measured yet ({data.subject}).\n"
    lines = [_line([data.corner, *data.columns]), "|" + "---|" * (1 + len(data.columns))]
    lines += [_line([label, *map(_shown, cells)]) for label, cells in data.lines]
    return "\n".join(lines) + f"\n\n{_origin(data)}\n"


def written(page: str, rows: Sequence[Row]) -> str:
    """Return the page with every table filled in; raises ValueError for a table without a definition."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"table {name!r}: one of {', '.join(TABLES)}")
        return f"{begin}\n{render(TABLES[name](rows))}\n{end}"

    return TABLE.sub(replaced, page)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(cell: Cell | None) -> str:
    """Format a figure, or two with the better or a bad estimate in bold."""
    if cell is None:
        return ""
    own = _number(cell.value, cell.row.unit)
    if cell.other is None:
        return own
    other = _number(cell.other, cell.row.unit)
    if cell.close is not None:
        return f"{own} · {other}" if abs(cell.other / cell.value - 1) <= cell.close else f"{own} · **{other}**"
    if cell.value == cell.other or math.isnan(cell.value + cell.other):
        return f"{own} · {other}"
    is_more_better = cell.row.unit.endswith("/s") or cell.row.figure == "hit_rate"
    is_better = (cell.value > cell.other) == is_more_better
    return f"**{own}** · {other}" if is_better else f"{own} · **{other}**"


def _number(value: float, unit: str) -> str:
    """Format three significant digits, all before the point, or a dash; column titles have the units, except s."""
    if math.isnan(value):
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{' s' if unit == 's' else ''}"


def _origin(data: TableData) -> str:
    """Name the days and commits of the rows, newest last."""
    runs = sorted({(cell.row.date, cell.row.commit) for _, cells in data.lines for cell in cells if cell})
    days: dict[str, list[str]] = {}
    for date, commit in runs:
        days.setdefault(date, []).append(commit)
    said = "; ".join(f"{date}, commit {' and '.join(commits)}" for date, commits in days.items())
    return f"({data.subject}; {said})"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results.csv", help="rows to show")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a table is out of date")
    args = parser.parse_args(argv)
    rows, outdated = read_rows(args.results), []
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = written(before, rows)
        if after != before:
            outdated.append(page)
            if not args.check:
                page.write_text(after, encoding="utf-8")
    for page in outdated:
        print(f"{page.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
    return 1 if args.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
