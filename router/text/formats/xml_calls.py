"""Tool calls with parameters between tags, as Qwen3.5 writes them.

The text between the tags of a parameter is its value, typed by the tool's schema. So text values are streamed while
being written, and others come complete. A parameter written twice is told twice, and JSON readers keep the later value.

A value may hold tags as text. So an end tag ends a value only if a fitting tag or the end of the answer follows. Models
may forget the end tag of a value: then another parameter of the tool on a line of its own ends the value, too. A call
is complete only behind an end tag.
"""

import json
import re

from router.text.formats.parts import (
    CallWriter,
    HeldText,
    Part,
    Step,
    begun,
    behind_call,
    in_json,
    num_begun,
    read_head,
)
from router.text.formats.shapes import CALL, CALL_END, FUNCTION, FUNCTION_END
from router.text.formats.typed_values import ToolSchemas, properties_of, typed, types_of

PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
MAX_TAG_CHARS = len(PARAMETER) + MAX_NAME_CHARS
"""Most characters of the head of a call or parameter without its last."""
SPACE = r"\s{0,64}"
BEGUN_NAME = rf"[^>\n]{{0,{MAX_NAME_CHARS}}}"
NAME = rf"([^>\n]{{1,{MAX_NAME_CHARS}}})>"
HEAD = re.compile(f"{SPACE}{FUNCTION}{NAME}")
BEGUN_HEAD = re.compile(f"{SPACE}(?:{begun(FUNCTION)}|{FUNCTION}{BEGUN_NAME})")
INSIDE = re.compile(f"{PARAMETER}{NAME}|{FUNCTION_END}|(?={CALL_END}|{CALL}|{FUNCTION}{NAME})")
"""What may follow the values of a call; tags that begin or end more than the call stay."""
LINE = re.compile(f"{PARAMETER}{NAME}\n")
BEGUN_LINE = re.compile(f"{PARAMETER}{BEGUN_NAME}>?")
VALUE_TAGS = (PARAMETER_END, PARAMETER, FUNCTION_END, CALL_END)
VALUE_TAG = re.compile("|".join(VALUE_TAGS))
"""Tags that may end a value."""


class Followers:
    """Tags of which one follows an end tag, perhaps behind white space."""

    def __init__(self, *tags: str) -> None:
        self._whole = re.compile(f"{SPACE}(?:{'|'.join(tags)})")
        self._begun = re.compile(f"{SPACE}(?:{'|'.join(map(begun, tags))})")

    def follow(self, text: str, at: int, is_last: bool) -> bool | None:
        """Tell whether a tag, or the end of the answer, follows at a position of the text; None while unknown."""
        if self._whole.match(text, at):
            return True
        if self._begun.fullmatch(text, at):
            return True if is_last else None
        return False


FOLLOWERS = {
    PARAMETER_END: Followers(PARAMETER, FUNCTION_END, FUNCTION, CALL_END, CALL),
    FUNCTION_END: Followers(CALL_END, CALL),
    CALL_END: Followers(CALL),
}
"""Followers of an end tag that ends a value."""


class XmlCall:
    """Reader of the calls between call tags."""

    def __init__(self, calls: CallWriter, schemas: ToolSchemas) -> None:
        self._calls, self._schemas = calls, schemas
        self._parameters: Parameters | None = None  # of the current call
        self._is_behind = False  # a call

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._is_behind:
            return self._find_next(held, part, is_last)
        if self._parameters is None:
            return self._begin(held, part, is_last)
        arguments, is_over = self._parameters.read(held, is_last)
        self._calls.add_arguments(part, arguments)
        if not is_over:
            return Step.WAIT
        self._calls.end()
        self._is_behind = True
        return Step.AGAIN

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Begin a call if its head is complete, or content if the text cannot become a call."""
        head = read_head(HEAD, BEGUN_HEAD, held, self._calls, is_last)
        if isinstance(head, Step):
            return head
        name = head[1].strip()
        self._calls.begin(part, name, "{")
        self._parameters, self._is_behind = Parameters(self._schemas, name), False
        return Step.AGAIN

    def _find_next(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Find another call, or the end of the calls."""
        held.text = held.text.lstrip()
        step = self._begin(held, part, is_last)
        return behind_call(held, CALL, CALL_END, is_last) if step is Step.TEXT else step


class Parameters:
    """Reader of the parameters of a call, as JSON behind its first brace."""

    def __init__(self, schemas: ToolSchemas, name: str) -> None:
        self._schema = schemas.get(name, {})
        self._properties = properties_of(self._schema)
        self._keys: set[str] = set()  # of parameters begun
        self._value: TextValue | TypedValue | None = None
        self._last = ""  # character of the current value
        self._written: list[str] = []

    def read(self, held: HeldText, is_last: bool) -> tuple[str, bool]:
        """Take text; return the certain JSON, and whether the call is over. A call that is cut off stays open."""
        while self._read_value(held, is_last):
            found = INSIDE.search(held.text)
            if found is None:
                held.text = "" if is_last else held.text[-MAX_TAG_CHARS:]
                break
            held.text = held.text[found.end() :]
            if found[1] is None:
                self._written.append("}")
                return self._taken(), True
            self._begin_value(found[1].strip())
        return self._taken(), False

    def _taken(self) -> str:
        written, self._written = "".join(self._written), []
        return written

    def _begin_value(self, key: str) -> None:
        allowed = types_of(self._properties.get(key), self._schema)
        self._value = TextValue() if allowed == {"string"} else TypedValue(allowed)
        separator = ", " if self._keys else ""
        self._written.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: {self._value.opening}")
        self._keys.add(key)
        self._last = ""

    def _read_value(self, held: HeldText, is_last: bool) -> bool:
        """Read text of the current value, if any; return False before its end."""
        if self._value is None:
            return True
        num_sure, end = self._find_end(held.text, is_last)
        self._written.append(self._value.add(held.text[:num_sure]))
        self._last = held.text[:num_sure][-1:] or self._last
        held.text = held.text[num_sure if end is None else end :]
        if end is None:
            return False
        self._written.append(self._value.end())
        self._value = None
        return True

    def _find_end(self, text: str, is_last: bool) -> tuple[int, int | None]:
        """Return the number of characters that surely belong to the value, and where the text behind it begins."""
        at = 0
        while tag := VALUE_TAG.search(text, at):
            is_end = self._is_end(tag, text, is_last)
            if is_end is None:
                return tag.start(), None
            if is_end:
                return tag.start(), tag.end() if tag[0] == PARAMETER_END else tag.start()
            at = tag.end()
        return len(text) - (0 if is_last else max(num_begun(text, each) for each in VALUE_TAGS)), None

    def _is_end(self, tag: re.Match[str], text: str, is_last: bool) -> bool | None:
        """Tell whether a tag ends the value; None while unknown."""
        if tag[0] != PARAMETER:
            return FOLLOWERS[tag[0]].follow(text, tag.end(), is_last)
        before = text[tag.start() - 1] if tag.start() else self._last
        if before != "\n":
            return False
        if line := LINE.match(text, tag.start()):
            return line[1].strip() in self._properties.keys() - self._keys
        return None if not is_last and BEGUN_LINE.fullmatch(text, tag.start()) else False


class TextValue:
    """A value of text, without the line break on either side."""

    opening = '"'

    def __init__(self) -> None:
        self._has_begun, self._newline = False, ""

    def add(self, text: str) -> str:
        """Return the JSON of certain text; a line break waits for what follows."""
        if not text:
            return ""
        if not self._has_begun:
            self._has_begun, text = True, text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        return in_json(text.removesuffix("\n"))

    def end(self) -> str:
        return '"'


class TypedValue:
    """A value in one of several types, written once it is complete."""

    opening = ""

    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed
        self._pieces: list[str] = []

    def add(self, text: str) -> str:
        self._pieces.append(text)
        return ""

    def end(self) -> str:
        text = "".join(self._pieces).removeprefix("\n").removesuffix("\n")
        try:
            return json.dumps(typed(text, self._allowed), ensure_ascii=False)
        except RecursionError:
            return json.dumps(text, ensure_ascii=False)
