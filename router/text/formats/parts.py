"""Parts of an answer, and tools shared by readers of all formats."""

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

MAX_CALLS = 128
"""Calls of an answer; further text is content."""
MAX_HEAD_CHARS = 512
"""Most characters of a call from the trigger to the arguments."""
MAX_DROPPED_CHARS = 256
"""Most characters between a call and its end tag."""
MAX_WITHHELD_CHARS = 16_384
"""Most characters withheld because a tag stands in a text whose end has not come; then the tag is text."""
ID_CHARS = string.ascii_letters + string.digits
SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New text of a call. The first piece carries id and name; the arguments of all pieces concatenate."""

    index: int  # of the call in the answer
    arguments: str  # a piece of JSON
    id: str = ""
    name: str = ""


@dataclass(slots=True)
class Part:
    """New text of an answer, by kind."""

    thought: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)  # a single piece for each call

    def add_call(self, piece: CallPiece) -> None:
        """Append a later piece of a call."""
        if self.calls and self.calls[-1].index == piece.index:
            self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + piece.arguments)
        else:
            self.calls.append(piece)


def joined(parts: Sequence[Part]) -> Part:
    """Return consecutive parts as one."""
    whole = Part("".join(part.thought for part in parts), "".join(part.content for part in parts))
    for part in parts:
        for piece in part.calls:
            whole.add_call(piece)
    return whole


def long_id() -> str:
    """Return a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Return a new id of a call for templates that take nothing but 9 letters and digits."""
    return "".join(secrets.choice(ID_CHARS) for _ in range(SHORT_ID_CHARS))


def is_short_id(text: str) -> bool:
    return len(text) == SHORT_ID_CHARS and text.isascii() and text.isalnum()


class CallWriter:
    """Writer of calls into parts, numbered within the answer.

    Attributes:
        is_open: true until the end of the call begun last; stays true if the call is cut off.
    """

    def __init__(self, new_id: Callable[[], str] = long_id, max_calls: int = MAX_CALLS) -> None:
        self._new_id, self._max_calls = new_id, max_calls
        self.num_calls, self.is_open = 0, False

    @property
    def is_full(self) -> bool:
        return self.num_calls >= self._max_calls

    def begin(self, part: Part, name: str, arguments: str = "", call_id: str = "") -> None:
        part.calls.append(CallPiece(self.num_calls, arguments, call_id or self._new_id(), name))
        self.num_calls += 1
        self.is_open = True

    def end(self) -> None:
        """End the call begun last."""
        self.is_open = False

    def add_arguments(self, part: Part, arguments: str) -> None:
        """Add arguments to the call begun last."""
        if arguments:
            part.add_call(CallPiece(self.num_calls - 1, arguments))


class HeldText:
    """Text not yet assigned to a part; line breaks next to a tag are dropped."""

    def __init__(self, *, follows_tag: bool) -> None:
        self.text = ""
        self.follows_tag = follows_tag
        self._num_breaks = 0  # line breaks before `text` that wait for what follows

    def until(self, tag: str, is_last: bool) -> tuple[str, bool]:
        """Take text certainly before `tag`, and tell whether `tag` has come; a tag of "" never comes."""
        if self.follows_tag:
            self.text = self.text.lstrip("\n")
            self.follows_tag = not self.text
        before, found, behind = self.text.partition(tag) if tag else (self.text, "", "")
        num_sure = len(before) - (0 if found or is_last else num_begun(before, tag))
        self.text = behind if found else before[num_sure:]
        text = before[:num_sure]
        if found or (tag and not is_last):
            text = text.rstrip("\n")
        told = "\n" * self._num_breaks + text if text or (is_last and not found) else ""
        self._num_breaks = 0 if found else num_sure - len(text) + (0 if told else self._num_breaks)
        return told, bool(found)


class Step(Enum):
    """Result of a reader's step."""

    WAIT = "wait"  # more text is needed
    AGAIN = "again"  # another part follows
    OVER = "over"  # the held text is behind the calls
    TEXT = "text"  # there is no call: trigger and held text are content


class CallReader(Protocol):
    """Incremental reader of the text behind a trigger: one call, or several calls in a row.

    A step takes text from the front of `held`, and adds calls to `part`, or content if the text is no call. A part gets
    either of the two. With `is_last`, no more text comes, and the reader does not wait.
    """

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step: ...


def read_head(
    head: re.Pattern[str], begun_head: re.Pattern[str], held: HeldText, calls: CallWriter, is_last: bool
) -> re.Match[str] | Step:
    """Take the head of a call from the front of the text; without a head, tell whether to wait or that there is none.

    Args:
        head: matches a head of at most `MAX_HEAD_CHARS`.
        begun_head: matches the beginnings of heads.
    """
    text = held.text[:MAX_HEAD_CHARS]
    found = None if calls.is_full else head.match(text)
    if found is not None:
        held.text = held.text[found.end() :]
        return found
    may_come = not is_last and not calls.is_full and len(text) < MAX_HEAD_CHARS
    return Step.WAIT if may_come and begun_head.fullmatch(text) else Step.TEXT


def behind_call(held: HeldText, trigger: str, end_tag: str, is_last: bool) -> Step:
    """Drop the end tag of a call, with little text before it; without an end tag, the text is content."""
    held.text = held.text.lstrip()
    text = held.text[: MAX_DROPPED_CHARS + len(end_tag)]
    end, begin = text.find(end_tag), text.find(trigger)
    if end >= 0 and not 0 <= begin < end:
        held.text = held.text[end + len(end_tag) :]
    elif begin < 0 and len(text) < MAX_DROPPED_CHARS + len(end_tag):
        if not is_last:
            return Step.WAIT
        held.text = text[: len(text) - num_begun(text, end_tag)]
    return Step.OVER


def num_begun(text: str, tag: str) -> int:
    """Count characters at the end of a text that may begin a tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def begun(tag: str) -> str:
    """Return a regular expression for all beginnings of a tag, the empty one included."""
    return "(?:" + "".join(f"(?:{re.escape(char)}" for char in tag[:-1]) + ")?" * len(tag[:-1]) + ")"


def in_json(text: str) -> str:
    """Return a piece of text as written inside a JSON string; written pieces concatenate."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
