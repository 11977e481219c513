"""Write the tables of README.md and benchmarks/README.md from results.csv, each between two markers.

    python -m benchmarks.tables            # write all tables
    python -m benchmarks.tables --check    # exit 1 if a page is out of date.

A cell is the newest row of a hardware, system and load. The line under a table names days and commits of the rows.
`table_data` chooses the rows; this module lays tables out.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.table_cells import Cell, TableData
from benchmarks.table_data import TABLES
from deploy.bench.results import ROOT, Row, read_rows

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
FIRST_PAGE_LOADS = (
    "one stream, 1024/128", "one stream, 16000/32", "8 streams, 1024/128", "32 requests/s, 1024/128",
    "512 at once, 1024/128",
)  # fmt: skip
"""Loads of the README's table; among them is one for each column that vLLM wins somewhere."""


def first_page(rows: Sequence[Row]) -> TableData:
    """Select the README's loads from the table beside vLLM."""
    data = TABLES["beside-vllm"](rows)
    return replace(data, lines=[line for line in data.lines if line[0] in FIRST_PAGE_LOADS])


SHOWN: dict[str, Callable[[Sequence[Row]], TableData]] = {**TABLES, "first-page": first_page}


def render(data: TableData) -> str:
    """Return Markdown of a table and the line below."""
    if not data.lines:
        return f"Not measured yet ({data.subject}).\n"
    lines = [_line([data.corner, *data.columns]), "|" + "---|" * (1 + len(data.columns))]
    lines += [_line([label, *map(_shown, cells)]) for label, cells in data.lines]
    return "\n".join(lines) + f"\n\n{_origin(data)}\n"


def written(page: str, rows: Sequence[Row]) -> str:
    """Return the page with every table made from the rows; raises ValueError for an unknown table."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in SHOWN:
            raise ValueError(f"table {name!r}: one of {', '.join(SHOWN)}")
        return f"{begin}\n{render(SHOWN[name](rows))}\n{end}"

    return TABLE.sub(replaced, page)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(cell: Cell | None) -> str:
    """Return a figure, or two with the better in bold; an estimate is bold if too far off."""
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
    """Return three significant digits, or all before the point, or a dash; titles of columns name milliseconds."""
    if math.isnan(value):
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{' s' if unit == 's' else ''}"


def _origin(data: TableData) -> str:
    """Return days and commits of the rows, newest last."""
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
