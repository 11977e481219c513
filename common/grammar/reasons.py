"""Reasons for the failure of a text or a grammar, taken from llguidance's messages."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

MAX_REASON_CHARS = 300
MAX_MARKED_CHARS = 40
REGEX_ERROR = "error: "
"""Start of the line with the reason in a message about a regular expression, below the expression and its mark."""
REGEX_AROUND = re.compile(r'^at \S+ invalid regex ".*" \(in regex\): | in regex /.*/$', re.DOTALL)
"""Text around other reasons, with the whole expression, which may be long."""

MEANINGS = {"NoExtensionBias": "no text can follow it"}
"""Words for llguidance's names of reasons."""


def reason(matcher: "llguidance.LLMatcher") -> str:
    """Return the matcher's error in a line, shortened to both ends; "" without an error."""
    line = _line(matcher.get_error().strip().splitlines())
    return MEANINGS.get(line) or shortened(line)


def shortened(text: str) -> str:
    """Return both ends of a text longer than `MAX_REASON_CHARS`."""
    half = MAX_REASON_CHARS // 2
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:half]}...{text[-half:]}"


def _line(lines: list[str]) -> str:
    """Return the line with the reason: the first line, or the error line below a regular expression."""
    for number, line in enumerate(lines):
        if line.startswith(REGEX_ERROR) and number >= 2:
            return f"{line.removeprefix(REGEX_ERROR)}, at {_marked(*lines[number - 2 : number])!r}"
    return REGEX_AROUND.sub("", next(iter(lines), ""))


def _marked(text: str, mark: str) -> str:
    """Return the part of the text above the carets."""
    begin = mark.find("^")
    return text[begin : mark.rfind("^") + 1][:MAX_MARKED_CHARS] if begin >= 0 else text
