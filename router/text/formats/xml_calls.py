"""Tool calls with parameters between tags, as Qwen3.5 writes them.

The text between the tags of a parameter is its value, typed by the tool's schema. So text values are streamed while
being written, and others come complete. Models may forget end tags of parameters. A parameter written twice is told
twice, and JSON readers keep the later value.
"""

import json
import re

from router.text.formats.parts import CallWriter, HeldText, Part, Step, in_json, num_begun
from router.text.formats.shapes import CALL, CALL_END, FUNCTION, FUNCTION_END
from router.text.formats.typed_values import ToolSchemas, properties_of, typed, types_of

PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
NAME = rf"([^>\n]{{1,{MAX_NAME_CHARS}}})>"
HEAD = re.compile(f"{FUNCTION}{NAME}")
PARAMETER_HEAD = re.compile(f"{PARAMETER}{NAME}")
ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END)
VALUE_END = re.compile("|".join(ENDS))
MAX_HEAD_CHARS = len(PARAMETER) + MAX_NAME_CHARS
"""Most characters of the head of a call or parameter without its last."""


class XmlCall:
    """Reader of a call between call tags."""

    def __init__(self, calls: CallWriter, schemas: ToolSchemas) -> None:
        self._calls, self._schemas = calls, schemas
        self._num_blank = 0  # white space before the head
        self._parameters: Parameters | None = None
        self._is_content = False

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        text = held.text
        end = text.find(CALL_END)
        is_over = end >= 0 or is_last
        inside = text[:end] if end >= 0 else text if is_last else text[: len(text) - num_begun(text, CALL_END)]
        behind = text[len(inside) :]
        held.text = inside[self._read(inside, part, is_over) :] + behind
        if not is_over:
            return Step.WAIT
        if self._is_content:
            part.content += behind[: len(CALL_END)]
        held.text = behind[len(CALL_END) :]
        return Step.OVER

    def _read(self, inside: str, part: Part, is_over: bool) -> int:
        """Read text of the call; return the number of characters read."""
        if self._is_content:
            part.content += inside
            return len(inside)
        if self._parameters is None and not self._begin(inside, part, is_over):
            return len(inside) if self._is_content else 0
        assert self._parameters is not None, "it has begun"
        arguments, num_read = self._parameters.read(inside, is_over)
        self._calls.add_arguments(part, arguments)
        return num_read

    def _begin(self, inside: str, part: Part, is_over: bool) -> bool:
        """Begin the call, or content if the text cannot become a call; return False for content or while unknown."""
        while self._num_blank < len(inside) and inside[self._num_blank].isspace():
            self._num_blank += 1
        head = None if self._calls.is_full else HEAD.match(inside, self._num_blank)
        if head is not None:
            name = head[1].strip()
            self._calls.begin(part, name)
            self._parameters = Parameters(self._schemas, name)
            return True
        if is_over or self._calls.is_full or len(inside) - self._num_blank > MAX_HEAD_CHARS:
            self._is_content = True
            part.content += CALL + inside
        return False


class Parameters:
    """Parameters of a call, as JSON."""

    def __init__(self, schemas: ToolSchemas, name: str) -> None:
        self._schema = schemas.get(name, {})
        self._properties = properties_of(self._schema)
        self._written = "{"  # JSON not returned yet
        self._separator = ""
        self._value: TextValue | TypedValue | None = None

    def read(self, text: str, is_over: bool) -> tuple[str, int]:
        """Return the certain JSON of more text, and the number of characters read.

        Unread characters come again, in front of later text.
        """
        at = 0
        while True:
            at, has_more = self._read_value(self._value, text, at, is_over) if self._value else self._find(text, at)
            if not has_more:
                break
        if is_over:
            self._written += "}"
        written, self._written = self._written, ""
        return written, at

    def _find(self, text: str, at: int) -> tuple[int, bool]:
        """Find the next parameter; return its value's position, or the end of text that begins none, and whether found.

        Text between parameters is dropped.
        """
        head = PARAMETER_HEAD.search(text, at)
        if head is None:
            return max(at, len(text) - MAX_HEAD_CHARS), False
        key = head[1].strip()
        allowed = types_of(self._properties.get(key), self._schema)
        self._value = TextValue() if allowed == {"string"} else TypedValue(allowed)
        self._written += f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {self._value.opening}"
        self._separator = ", "
        return head.end(), True

    def _read_value(self, value: "TextValue | TypedValue", text: str, at: int, is_over: bool) -> tuple[int, bool]:
        """Read text of the current value; return the position behind, and whether the value has ended."""
        found = VALUE_END.search(text, at)
        end = found.start() if found else len(text)
        if not found and not is_over:
            end = max(at, end - max(num_begun(text, tag) for tag in ENDS))
        self._written += value.add(text[at:end])
        if not found and not is_over:
            return end, False
        self._written += value.end()
        self._value = None
        return end, True


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
