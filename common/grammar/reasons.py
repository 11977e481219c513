"""Why a text or a grammar does not go on, in the words of llguidance."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

MAX_REASON_CHARS = 300
MAX_MARKED_CHARS = 40
REGEX_ERROR = "error: "
"""Begins the line that has the reason in a complaint about a regular expression, below the expression and a mark."""
REGEX_AROUND = re.compile(r'^at \S+ invalid regex ".*" \(in regex\): | in regex /.*/$', re.DOTALL)
"""Stands around other reasons, with the expression, which may be long."""


def reason(matcher: "llguidance.LLMatcher") -> str:
    """Say in one line what is wrong, of a long one both ends; "" if nothing is."""
    return shortened(_line(matcher.get_error().strip().splitlines()))


def shortened(text: str) -> str:
    """Keep both ends of a text that is longer than `MAX_REASON_CHARS`."""
    half = MAX_REASON_CHARS // 2
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:half]}...{text[-half:]}"


def _line(lines: list[str]) -> str:
    """Choose the line with the reason: the first, but of a regular expression the one that names the error."""
    for number, line in enumerate(lines):
        if line.startswith(REGEX_ERROR) and number >= 2:
            return f"{line.removeprefix(REGEX_ERROR)}, at {_marked(*lines[number - 2 : number])!r}"
    return REGEX_AROUND.sub("", next(iter(lines), ""))


def _marked(text: str, mark: str) -> str:
    """Cut out what stands above the carets."""
    begin = mark.find("^")
    return text[begin : mark.rfind("^") + 1][:MAX_MARKED_CHARS] if begin >= 0 else text
