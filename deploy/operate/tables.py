"""Tables for people, in a terminal."""

import textwrap
from collections.abc import Sequence

BLANK = "-"
WIDTH = 80
"""Columns of a terminal."""


def printable(text: str) -> str:
    """Return the text, with escapes if unprintable, so that foreign names cannot move the cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a line for each row, with equal columns; all rows have equally many cells, and the first is the head.

    Cells may hold foreign text, so unprintable characters are escaped.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Wrap text to the width of a terminal, with following lines indented."""
    return textwrap.wrap(printable(text), WIDTH, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)
