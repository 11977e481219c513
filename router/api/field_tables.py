"""Writes the lists of fields and errors into README.md, of the tables that requests are checked with.

python -m router.api.field_tables README.md
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from router.api.openapi import REASONS
from router.base.json_fields import Field, Object, Table
from router.base.json_rules import Only
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
    """The page with each list as it is now."""
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
    """Markdown: fields of responses that chats have, too."""
    return _filled(f"As in chats: {', '.join(f'`{field.name}`' for field in AS_IN_CHATS)}.")


def errors() -> str:
    """Markdown: what each status means."""
    rows = [f"| {status} | {reason} |" for status, reason in REASONS.items()]
    return "\n".join(["| status | |", "|---|---|", *rows]) + "\n"


def rendered(table: Table) -> str:
    """Markdown: a line for each field that is implemented, and one for all others."""
    lines = ["| field | values | without it | |", "|---|---|---|---|", *_lines(table, "")]
    others = [field for field in table.fields.values() if not field.is_implemented]
    neutral = ", ".join(f"`{field.name}`{_neutral(field.rule)}" for field in others)
    known = f"Known, and refused unless it changes nothing: {neutral}."
    return "\n".join(lines) + f"\n\n{_filled(known)}"


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def _lines(table: Table, within: str) -> Iterator[str]:
    for field in table.fields.values():
        if isinstance(field.rule, Object):
            yield from _lines(field.rule.table, f"{within}{field.name}.")
        elif field.is_implemented:
            yield f"| `{within}{field.name}` | {field.rule.wants} | {_default(field)} | {field.about} |"


def _default(field: Field) -> str:
    return json.dumps(field.default) if field.has_default else ""


def _neutral(rule: object) -> str:
    assert isinstance(rule, Only)
    return f" ({rule.wants})" if rule.neutral else ""


def main(pages: list[str]) -> None:
    for page in map(Path, pages):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
