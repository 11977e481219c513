"""Tool calls written as JSON: in tags, as Qwen3 writes them, or alone, as Llama 3 does.

Text beginning as `{"name": "...", "arguments": {` is a call, whatever follows. So arguments can be streamed while being
written. A call with another beginning is recognized only when complete.
"""

import json
import re

from common.base.json_file import Json
from router.text.formats.json_arguments import ArgumentsReader
from router.text.formats.parts import MAX_CALLS, CallWriter, HeldText, Part, Step, num_begun
from router.text.formats.shapes import CALL, CALL_END

SPACE = r"[ \n\r\t]{0,64}"
HEAD = re.compile(
    rf'{SPACE}\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rf'"name"{SPACE}:{SPACE}("(?:[^"\\]|\\.){{0,256}}"){SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)',
    re.DOTALL,
)
"""Beginning of a call up to its arguments; of bounded length, because searched again at each token."""
AFTER = re.compile(r"[ \n\r\t]*(\}?)[ \n\r\t;]*")
"""Text between the arguments of a call and the next text."""
ESCAPED = re.compile(r"\\.", re.DOTALL)
"""An escape in a JSON string."""


def head_of(text: str) -> tuple[str, int] | None:
    """Return the call's name and the start of its arguments if a text begins with a call; otherwise None."""
    head = HEAD.match(text)
    if head is None:
        return None
    try:
        return str(json.loads(head[1])), head.end()
    except ValueError:
        return None


def whole_calls(text: str, max_calls: int) -> list[tuple[str, str]]:
    """Return name and arguments of each call if the text is only calls, perhaps separated by semicolons; else none."""
    calls: list[tuple[str, str]] = []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
            call = _call(value)
        except (ValueError, RecursionError):
            return []
        if call is None or len(calls) == max_calls:
            return []
        calls.append(call)
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _call(value: Json) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def take_calls(writer: CallWriter, part: Part, text: str) -> bool:
    """Take calls if the whole text consists of calls; return False otherwise."""
    calls = whole_calls(text, MAX_CALLS - writer.num_calls)
    for name, arguments in calls:
        writer.begin(part, name, arguments)
    return bool(calls)


class EndTag:
    """Search for the end tag of a growing call, outside of the call's strings."""

    def __init__(self) -> None:
        self._searched = 0  # characters up to and including a tag in a string
        self._is_quoted = False

    def find(self, text: str) -> int:
        """Return the tag's position in the call's text so far; -1 before such a tag."""
        while (end := text.find(CALL_END, self._searched)) >= 0:
            num_quotes = ESCAPED.sub("", text[self._searched : end]).count('"')
            if self._is_quoted == num_quotes % 2:
                return end
            self._searched, self._is_quoted = end + len(CALL_END), True
        return -1


class JsonCalls:
    """Reader of calls between tags, or, without an end tag, of calls alone."""

    def __init__(self, calls: CallWriter, end_tag: str) -> None:
        self._calls, self._end_tag = calls, end_tag
        self._arguments: ArgumentsReader | None = None  # of the current call
        self._is_after = False  # the arguments of a call
        self._whole_end = EndTag()

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._is_after:
            return self._after(held, is_last)
        if self._arguments is not None:
            return self._argue(self._arguments, held, part, is_last)
        return self._begin(held, part, is_last)

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        head = None if self._calls.is_full else head_of(held.text)
        if head is not None:
            name, end = head
            self._calls.begin(part, name)
            held.text = held.text[end:]
            self._arguments = ArgumentsReader(self._end_tag)
            return Step.AGAIN
        if self._end_tag:
            return self._whole_call(held, part, is_last)
        if is_last:  # the whole rest is either calls or content
            part.content += "" if take_calls(self._calls, part, held.text) else held.text
            held.text = ""
        return Step.WAIT

    def _argue(self, reader: ArgumentsReader, held: HeldText, part: Part, is_last: bool) -> Step:
        arguments, rest = reader.feed(held.text, is_last=is_last)
        self._calls.add_arguments(part, arguments)
        held.text = rest or ""
        if rest is None:
            return Step.WAIT
        self._is_after = True
        return Step.AGAIN

    def _after(self, held: HeldText, is_last: bool) -> Step:
        """Drop the end of a call; text behind the last call is content."""
        between = AFTER.match(held.text)
        assert between is not None, "it matches nothing, too"
        rest = held.text[between.end() :]
        if not rest and not is_last:
            return Step.WAIT
        if between[1] and rest.startswith("{"):
            held.text = rest
            self._is_after, self._arguments = False, None
            return Step.AGAIN
        if self._end_tag:
            before, tag, behind = rest.partition(CALL_END)
            if not tag and not is_last:
                return Step.WAIT
            rest = behind if tag else before[: len(before) - num_begun(before, CALL_END)]
        held.text = rest
        return Step.OVER

    def _whole_call(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Take a call without the usual beginning, once its end tag has come."""
        text = held.text
        end = self._whole_end.find(text)
        if end < 0 and not is_last:
            return Step.WAIT
        is_call = take_calls(self._calls, part, text if end < 0 else text[:end])
        if not is_call:
            end = text.find(CALL_END)
        whole = text if end < 0 else text[: end + len(CALL_END)]
        held.text = text[len(whole) :]
        if not is_call:
            part.content += CALL + whole
        return Step.OVER
