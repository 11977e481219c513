"""Write the tables of README.md, benchmarks/README.md and docs/design/fronts.md, each between two markers.

    python -m benchmarks.tables            # write all tables
    python -m benchmarks.tables --check    # exit 1 if a page is out of date.

Rows are of results.csv. A cell is the newest figure of a hardware, system and load: the median, if it was run several
times under equal conditions. The lines under a table name days, commits, and how the servers were started.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables.cells import RESULTS, results
from benchmarks.tables.layout import render
from benchmarks.tables.registry import TABLES
from deploy.bench.origin import ROOT
from deploy.bench.results import Row

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "docs" / "design" / "fronts.md")
TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def written(page: str, rows: Sequence[Row]) -> str:
    """Return the page with every table made from the rows; raises ValueError for an unknown table."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"table {name!r}: one of {', '.join(TABLES)}")
        return f"{begin}\n{render(TABLES[name](rows))}\n{end}"

    return TABLE.sub(replaced, page)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows to show")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a table is out of date")
    args = parser.parse_args(argv)
    rows, outdated = results(args.results), []
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
