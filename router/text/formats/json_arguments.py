"""Incremental reader of a call's arguments written as JSON."""

import re

from router.text.formats.parts import num_begun

IN_STRING = re.compile(r'"|\\')
SIGNS = r'["{}\[\]]'


class ArgumentsReader:
    """Streaming reader of the arguments of a call.

    The reader follows braces, brackets and strings only; the client checks the rest. An end tag within a string is
    text. The tag is withheld until the string ends, because a model may forget to end a string. In such a case the tag
    ends the call.
    """

    def __init__(self, end_tag: str, depth: int = 0) -> None:
        """Begin before the arguments, or, with a `depth`, inside as many braces and brackets."""
        self._end_tag = end_tag
        self._signs = re.compile(f"{re.escape(end_tag)}|{SIGNS}" if end_tag else SIGNS)
        self._held = ""
        self._at = 0  # position in `_held`; earlier text has been followed
        self._string = -1  # start of the current string in `_held`, or 0; -1: none
        self._depth = depth

    def feed(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return certain arguments, and once the arguments have ended, the text behind; None before the end."""
        self._held += text
        end = self._followed()
        sure = self._num_sure() if end is None else end
        is_over = end is not None or (is_last and bool(self._end_tag) and self._held.startswith(self._end_tag, sure))
        if is_last and not is_over and self._string >= 0:
            sure = len(self._held)
        told, self._held = self._held[:sure], self._held[sure:]
        self._at, self._string = self._at - sure, max(0, self._string - sure) if self._string >= 0 else -1
        return told, self._held if is_over else None

    def _followed(self) -> int | None:
        """Follow the withheld text; return the end of the arguments, None before it."""
        while True:
            found = (self._signs if self._string < 0 else IN_STRING).search(self._held, self._at)
            num_held = num_begun(self._held, self._end_tag) if self._string < 0 else 0
            if found is None or (num_held and found.start() >= len(self._held) - num_held):
                self._at = max(self._at, len(self._held) - num_held)
                return None
            sign, self._at = found[0], found.end()
            if sign == "\\":
                if self._at == len(self._held):
                    self._at -= 1
                    return None
                self._at += 1
            elif sign == '"':
                self._string = found.start() if self._string < 0 else -1
            elif sign == self._end_tag:
                return found.start()
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    return self._at

    def _num_sure(self) -> int:
        """Return the number of characters certain to be arguments."""
        tag = self._held.find(self._end_tag, self._string) if self._string >= 0 and self._end_tag else -1
        return min(self._at, tag if tag >= 0 else len(self._held) - num_begun(self._held, self._end_tag))
