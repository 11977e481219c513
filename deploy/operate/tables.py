"""Tables for people, in a terminal."""

import textwrap
from collections.abc import Sequence

BLANK = "-"
WIDTH = 80
"""Of a terminal."""


def printable(text: str) -> str:
    """As it is if a terminal shows it as it is, else with escapes: what others named moves no cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, the first of which is the head; all have as many cells.

    What they say may be somebody else's: nothing in it moves the cursor.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Prose in lines of a terminal, the second one and those behind it indented."""
    return textwrap.wrap(printable(text), WIDTH, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)
