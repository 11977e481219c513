"""Protection against special tokens in client text, so no client can forge another role of a chat.

A chat template puts special tokens around each message, and a tokenizer recognizes special tokens by their text. So
before rendering, a mark is inserted into every special token in a client's strings. Marked text is no special token.
The mark is removed when the prompt becomes tokens (`Tokenizer.encode`). Prompts without a mark are encoded as usual.
"""

import re
import secrets
from collections.abc import Iterable

from common.base.json_file import Json


class ControlTokens:
    """Texts of a tokenizer's special tokens; tokens of a single character are too short to be broken."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted(text for text in texts if len(text) > 1)
        self.texts = tuple(known)
        self._known = re.compile(_pattern(known)) if known else None
        self._beginnings = frozenset(text[:length] for text in known for length in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def broken(self, value: Json, mark: str) -> Json:
        """Return JSON with the mark behind the first character of each special token in its strings.

        The mark is also put into the beginning of a special token at the end of a string, because a template may write
        the rest. Raises RecursionError for values nested too deep.
        """
        if isinstance(value, str):
            return self._broken_text(value, mark)
        if isinstance(value, list):
            return [self.broken(each, mark) for each in value]
        if isinstance(value, dict):
            return {self._broken_text(key, mark): self.broken(each, mark) for key, each in value.items()}
        return value

    def _broken_text(self, text: str, mark: str) -> str:
        if self._known is None:
            return text
        while self._known.search(text):  # again for overlapping tokens
            text = self._known.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                begin = len(text) - length + 1
                text = text[:begin] + mark + text[begin:]
        return text


def _pattern(texts: Iterable[str]) -> str:
    """Return a regular expression for any of `texts`; shared beginnings are merged, because there may be hundreds."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    may_end = rests.pop("", None) is not None
    branches = "|".join(re.escape(char) + _pattern(rest) for char, rest in rests.items())
    return f"(?:{branches})?" if may_end and branches else f"(?:{branches})" if len(rests) > 1 else branches


def new_mark() -> str:
    """Return a mark unforeseeable by clients, of characters never escaped."""
    return secrets.token_hex(8)
