"""Writes the list of fields into README.md, of the table that requests are checked with.

python -m router.field_list README.md
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from router.completion_fields import COMPLETION_FIELDS
from router.json_fields import Field, Object, Table
from router.json_rules import Only

LIST = re.compile(r"(<!-- fields -->\n).*?(<!-- end of fields -->)", re.DOTALL)
WIDTH = 125


def written(page: str) -> str:
    """The page with the list as the table has it."""
    return LIST.sub(lambda match: f"{match[1]}\n{rendered(COMPLETION_FIELDS)}\n{match[2]}", page)


def rendered(table: Table) -> str:
    """Markdown: a line for each field that is implemented, and one for all others."""
    lines = ["| field | values | without it | |", "|---|---|---|---|", *_lines(table, "")]
    others = [field for field in table.fields.values() if not field.is_implemented]
    neutral = ", ".join(f"`{field.name}`{_neutral(field.rule)}" for field in others)
    known = f"Known, and refused unless it changes nothing: {neutral}."
    return "\n".join(lines) + f"\n\n{textwrap.fill(known, WIDTH, break_long_words=False, break_on_hyphens=False)}\n"


def _lines(table: Table, within: str) -> Iterator[str]:
    for field in table.fields.values():
        if isinstance(field.rule, Object):
            yield from _lines(field.rule.table, f"{field.name}.")
        elif field.is_implemented:
            yield f"| `{within}{field.name}` | {field.rule.wants} | {_shown(field)} | {field.about} |"


def _shown(field: Field) -> str:
    default: Any = field.default
    return "" if default in (None, "", ()) else json.dumps(default)


def _neutral(rule: object) -> str:
    assert isinstance(rule, Only)
    return f" ({rule.wants})" if rule.neutral else ""


def main(pages: list[str]) -> None:
    for page in map(Path, pages):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
