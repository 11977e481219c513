"""Incremental reader of a call's arguments written as JSON."""

import re

from router.text.formats.parts import MAX_WITHHELD_CHARS, num_begun

IN_STRING = re.compile(r'"|\\')
SIGNS = r'["{}\[\]]'


class ArgumentsReader:
    """Streaming reader of the arguments of a call.

    The reader follows braces, brackets and strings only; the client checks the rest. A tag within a string is text. The
    tag is withheld until the string ends, because a model may forget to end a string. If the answer ends first, the tag
    ends the call.
    """

    def __init__(self, *tags: str, depth: int = 0) -> None:
        """Begin before the arguments, or, with a `depth`, inside as many braces and brackets; `tags` end a call."""
        self._tags = tags
        self._tag = re.compile("|".join(map(re.escape, tags)) or r"(?!)")
        self._signs = re.compile("|".join([*map(re.escape, tags), SIGNS]))
        self._held = ""
        self._at = 0  # position in `_held`; earlier text has been followed
        self._is_string = False  # at `_at`
        self._tags_from = 0  # position in `_held`; earlier tags of the current string are text
        self._depth = depth

    def feed(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return certain arguments, and once the arguments have ended, the text behind; None before the end."""
        self._held += text
        end = self._followed()
        if end is not None:
            return self._held[:end], self._held[end:]
        tag = self._tag_in_string()
        if is_last and tag is not None:
            return self._held[:tag], self._held[tag:]
        if self._is_string and is_last:
            return self._held, None
        sure = min(self._at, len(self._held) - self._num_begun() if tag is None else tag)
        told, self._held = self._held[:sure], self._held[sure:]
        self._at, self._tags_from = self._at - sure, max(0, self._tags_from - sure)
        return told, None

    def _followed(self) -> int | None:
        """Follow the withheld text; return the end of the arguments, None before it."""
        sure = len(self._held) - self._num_begun()
        while True:
            found = (IN_STRING if self._is_string else self._signs).search(self._held, self._at)
            if found is None or not (self._is_string or found.start() < sure):
                self._at = max(self._at, len(self._held) if self._is_string else sure)
                return None
            sign, self._at = found[0], found.end()
            if sign == "\\":
                if self._at == len(self._held):
                    self._at -= 1
                    return None
                self._at += 1
            elif sign == '"':
                self._is_string, self._tags_from = not self._is_string, found.start()
            elif sign in self._tags:
                return found.start()
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    return self._at

    def _tag_in_string(self) -> int | None:
        """Return the position of the first withheld tag in the current string, None without one."""
        while self._is_string and (tag := self._tag.search(self._held, self._tags_from)):
            if len(self._held) - tag.start() < MAX_WITHHELD_CHARS:
                return tag.start()
            self._tags_from = tag.end()
        return None

    def _num_begun(self) -> int:
        return max((num_begun(self._held, tag) for tag in self._tags), default=0)
