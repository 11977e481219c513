"""Tool calls written as JSON objects: in tags, as Qwen3 writes them, or alone, as Llama 3 does.

Text beginning as `{"name": "...", "arguments": {` is a call, whatever follows. So arguments can be streamed while being
written. A call with another beginning is recognized only when complete, and has a limited length.
"""

import json
import re
from collections.abc import Callable

from common.base.json_file import Json
from router.text.formats.json_arguments import ArgumentsReader
from router.text.formats.parts import CallWriter, HeldText, Part, Step, behind_call
from router.text.formats.shapes import CALL, CALL_END

SPACE = r"[ \n\r\t]{0,64}"
HEAD = re.compile(
    rf'\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rf'"name"{SPACE}:{SPACE}("(?:[^"\\]|\\.){{0,256}}"){SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)',
    re.DOTALL,
)
"""Beginning of a call up to its arguments; of bounded length, because searched again at each token."""
MAX_HEAD_CHARS = 2048
"""More characters than the beginning of a call has."""
MAX_WHOLE_CHARS = 8192
"""Most characters of a call with another beginning; withheld, because the text becomes content without a call."""
OPENING = re.compile(rf"({SPACE})\{{")
BLANK = re.compile(SPACE)
BEHIND = re.compile(rf"{SPACE}([}},])")
"""The end of a call's object behind the arguments, or further fields."""


class CallObjects:
    """Reader of calls in a row, of which each is an object. `Step.TEXT` tells that the first is none.

    Args:
        tags: end a call that a model forgot to end.
        separators: characters between calls.
    """

    def __init__(self, calls: CallWriter, *tags: str, separators: str = " \n\r\t;") -> None:
        self._calls, self._tags, self._separators = calls, tags, separators
        self._call: ObjectCall | None = None
        self._blank = ""  # before the first call
        self._has_called = False

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._call is None:
            return self._find(held, is_last)
        step = self._call.step(held, part, is_last)
        if step is Step.OVER:
            self._call, self._has_called = None, True
            return Step.AGAIN
        if step is Step.TEXT:
            return self._end(held)
        return step

    def _find(self, held: HeldText, is_last: bool) -> Step:
        """Find the next object, or the end of the calls."""
        if self._has_called:
            held.text = held.text.lstrip(self._separators)
        opening = OPENING.match(held.text)
        if opening is not None and not self._calls.is_full:
            self._blank, held.text = opening[1], held.text[opening.end(1) :]
            self._call = ObjectCall(self._calls, *self._tags)
            return Step.AGAIN
        return Step.WAIT if BLANK.fullmatch(held.text) and not is_last else self._end(held)

    def _end(self, held: HeldText) -> Step:
        if self._has_called:
            return Step.OVER
        held.text = self._blank + held.text
        return Step.TEXT


class ObjectCall:
    """Reader of a call written as an object, whose brace has come. `Step.TEXT` leaves an object that is no call."""

    def __init__(self, calls: CallWriter, *tags: str) -> None:
        self._calls, self._tags = calls, tags
        self._reader = ArgumentsReader(*tags)  # of the whole object, of the arguments, or of the fields behind
        self._num_followed = 0  # characters of the whole object
        self._read: Callable[[HeldText, Part, bool], Step] = self._begin

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        return self._read(held, part, is_last)

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Begin the call if its head is complete; or take the call once the object is."""
        if self._num_followed < MAX_HEAD_CHARS and (head := head_of(held.text)) is not None:
            name, end = head
            self._calls.begin(part, name)
            held.text = held.text[end:]
            self._reader, self._read = ArgumentsReader(*self._tags), self._argue
            return Step.AGAIN
        text = held.text[:MAX_WHOLE_CHARS]
        rest = self._reader.feed(text[self._num_followed :], is_last=is_last)[1]
        self._num_followed = len(text)
        if rest is None:
            return Step.WAIT if not is_last and len(text) < MAX_WHOLE_CHARS else Step.TEXT
        end = len(text) - len(rest)
        call = call_of(text[:end])
        if call is None:
            return Step.TEXT
        self._calls.begin(part, *call)
        self._calls.end()
        held.text = held.text[end:]
        return Step.OVER

    def _argue(self, held: HeldText, part: Part, is_last: bool) -> Step:
        arguments, rest = self._reader.feed(held.text, is_last=is_last)
        self._calls.add_arguments(part, arguments)
        held.text = rest or ""
        if rest is None:
            return Step.WAIT
        self._calls.end()
        self._read = self._find_end
        return Step.AGAIN

    def _find_end(self, held: HeldText, _: Part, is_last: bool) -> Step:
        """Find the end of the object, which a model may forget."""
        behind = BEHIND.match(held.text)
        if behind is None:
            return Step.WAIT if BLANK.fullmatch(held.text) and not is_last else Step.OVER
        held.text = held.text[behind.end() :]
        if behind[1] == "}":
            return Step.OVER
        self._reader, self._read = ArgumentsReader(*self._tags, depth=1), self._drop
        return Step.AGAIN

    def _drop(self, held: HeldText, _: Part, is_last: bool) -> Step:
        """Drop fields behind the arguments."""
        rest = self._reader.feed(held.text, is_last=is_last)[1]
        held.text = rest or ""
        return Step.WAIT if rest is None else Step.OVER


class TaggedCalls:
    """Reader of calls between call tags."""

    def __init__(self, calls: CallWriter) -> None:
        self._objects = CallObjects(calls, CALL_END, CALL)
        self._is_behind = False  # the calls

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._is_behind:
            return behind_call(held, CALL, CALL_END, is_last)
        step = self._objects.step(held, part, is_last)
        self._is_behind = step is Step.OVER
        return Step.AGAIN if self._is_behind else step


def head_of(text: str) -> tuple[str, int] | None:
    """Return the call's name and the start of its arguments if a text begins with a call; otherwise None."""
    head = HEAD.match(text)
    if head is None:
        return None
    try:
        return str(json.loads(head[1])), head.end()
    except ValueError:
        return None


def call_of(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call that is a JSON object; None for another text.

    Arguments may be left out, null, or written as a string of JSON.
    """
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = _object(value.get("arguments", value.get("parameters")))
        return None if arguments is None else (value["name"], json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError):
        return None


def _object(arguments: Json) -> Json:
    if isinstance(arguments, str) and arguments.strip():
        arguments = json.loads(arguments)
    return {} if arguments is None or arguments == "" else arguments if isinstance(arguments, dict) else None
