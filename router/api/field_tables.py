"""Write the tables of fields and errors into docs/api.md, from the tables by which requests are checked.

python -m router.api.field_tables docs/api.md
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from router.api.openapi import REASONS
from router.base.json_fields import Field, Table
from router.base.json_rules import Rule
from router.requests.chat_fields import CHAT_FIELDS
from router.requests.completion_fields import COMPLETION_FIELDS, GENERATION_FIELDS
from router.requests.responses_fields import RESPONSES_FIELDS

OF_CHATS = Table(*(field for field in CHAT_FIELDS.fields.values() if field not in GENERATION_FIELDS))
OWN_OF_RESPONSES, AS_IN_CHATS = (
    [field for name, field in RESPONSES_FIELDS.fields.items() if (field is CHAT_FIELDS.fields.get(name)) is is_shared]
    for is_shared in (False, True)
)
WIDTH = 125


def written(page: str) -> str:
    """Return the page with each table as the code has it now."""
    lists = {
        "fields": rendered(COMPLETION_FIELDS),
        "chat fields": rendered(OF_CHATS),
        "response fields": f"{rendered(Table(*OWN_OF_RESPONSES))}\n{as_in_chats()}",
        "errors": errors(),
    }
    for name, shown in lists.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{shown}\n{end}{after}"
    return page


def as_in_chats() -> str:
    """Return Markdown that names the fields of responses shared with chats."""
    return _filled(f"The same as in chats: {', '.join(f'`{field.name}`' for field in AS_IN_CHATS)}.")


def errors() -> str:
    """Return Markdown with the meaning of each status."""
    rows = [f"| {status} | {reason} |" for status, reason in REASONS.items()]
    return "\n".join(["| status | meaning |", "|---|---|", *rows]) + "\n"


def rendered(table: Table) -> str:
    """Return Markdown: a row for each implemented field, and a sentence that lists all others."""
    lines = ["| field | values | default | meaning |", "|---|---|---|---|", *_lines(table, "")]
    others = [field for field in table.fields.values() if not field.is_implemented]
    neutral = ", ".join(f"`{field.name}`{_neutral(field.rule)}" for field in others)
    known = f"Refused with 400 unless null, or the value in parentheses: {neutral}."
    return "\n".join(lines) + f"\n\n{_filled(known)}"


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def _lines(table: Table, within: str) -> Iterator[str]:
    for field in table.fields.values():
        if field.rule.table is not None:
            yield from _lines(field.rule.table, f"{within}{field.name}.")
        elif field.is_implemented:
            yield f"| `{within}{field.name}` | {field.rule.wants} | {_default(field)} | {field.about} |"


def _default(field: Field) -> str:
    return json.dumps(field.default) if field.has_default else ""


def _neutral(rule: Rule) -> str:
    return f" ({rule.wants})" if rule.neutral else ""


def main(pages: list[str]) -> None:
    for page in map(Path, pages):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
