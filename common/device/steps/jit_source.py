"""Sources of kernels, found quickly: Triton asks `inspect` for the source of each of some hundred functions on import.

`inspect` reads all tokens of a function to find its end, which takes a tenth of a worker's imports.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HEADER_END = re.compile(r".*\)(\s*->.*)?:\s*(#.*)?$")
STRINGS = '"""', "'''"


@contextmanager
def quick_blocks() -> Iterator[None]:
    """Have `inspect` find the end of a function by indentation, where that is sure; for imports inside the context."""
    names: Any = inspect  # the stub lacks the function
    read_tokens = names.getblock

    def getblock(lines: Sequence[str]) -> list[str]:
        return block(lines) or list(read_tokens(lines))

    names.getblock = getblock
    try:
        yield
    finally:
        names.getblock = read_tokens


def block(lines: Sequence[str]) -> list[str]:
    """Return the lines of the function with which `lines` begin, as `inspect.getblock` does; empty where unsure.

    Sure is a function of a module without a string of several lines that is open at the end found. `):` or a type
    behind it ends the header.
    """
    begin = next((i for i, line in enumerate(lines) if line.startswith("def ")), len(lines))
    body = next((i + 1 for i in range(begin, len(lines)) if HEADER_END.match(lines[i])), len(lines))
    end = next((i for i in range(body, len(lines)) if lines[i].strip() and not lines[i][0].isspace()), len(lines))
    while end > body and not lines[end - 1].strip():
        end -= 1
    text = "".join(lines[body:end])
    is_sure = lines[0].startswith(("@", "def ")) and all(text.count(quotes) % 2 == 0 for quotes in STRINGS)
    return list(lines[:end]) if is_sure and end > body else []
