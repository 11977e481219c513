"""Special tokens in what a client wrote: in a chat they stay text, so that nobody speaks in another's name.

A chat template puts special tokens around what each one says, and a tokenizer knows them by their text. So in every
string of a client a mark is put into what would be one, before the template sees it. Where the mark is in the prompt
there is no special token, and it is taken out when the prompt becomes tokens (`Tokenizer.encode`). A prompt without
it is encoded as ever.
"""

import re
import secrets
from collections.abc import Iterable
from typing import Any


class ControlTokens:
    """The special tokens of a tokenizer, as text; those of one character are too short to be broken."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted(text for text in texts if len(text) > 1)
        self.texts = tuple(known)
        self._known = re.compile(_pattern(known)) if known else None
        self._beginnings = frozenset(text[:length] for text in known for length in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def broken(self, value: Any, mark: str) -> Any:
        """JSON with the mark in each special token of its strings, behind the first character.

        So it is in what may only begin one, at the end of a string: a template may write the rest. Raises
        RecursionError for values nested too deep.
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
        while self._known.search(text):  # again for those that overlap
            text = self._known.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                begin = len(text) - length + 1
                text = text[:begin] + mark + text[begin:]
        return text


def _pattern(texts: Iterable[str]) -> str:
    """Matches one of them, the same beginning of several looked at once: a tokenizer may have hundreds."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    may_end = rests.pop("", None) is not None
    branches = "|".join(re.escape(char) + _pattern(rest) for char, rest in rests.items())
    return f"(?:{branches})?" if may_end and branches else f"(?:{branches})" if len(rests) > 1 else branches


def new_mark() -> str:
    """One that no client can have foreseen, of characters that nothing escapes."""
    return secrets.token_hex(8)
