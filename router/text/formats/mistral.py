"""Tool calls of Mistral's models behind `[TOOL_CALLS]`: named calls, one each, or a JSON list of calls.

A named call is `NAME[ARGS]{...}`, perhaps with `[CALL_ID]` and an id behind the name. Models of any version are read
alike. Templates take ids of nine letters and digits only.
"""

import hashlib
import json
import re
from collections.abc import Sequence

from common.base.json_file import Json, JsonObject
from router.text.formats.json_arguments import ArgumentsReader
from router.text.formats.json_calls import head_of, whole_calls
from router.text.formats.parts import ID_CHARS, SHORT_ID_CHARS, CallWriter, HeldText, Part, Step, is_short_id
from router.text.formats.shapes import ARGS, CALL_ID, CALLS

MARK = re.compile(rf"{re.escape(CALLS)}|{re.escape(CALL_ID)}|{re.escape(ARGS)}|\{{")
NAME = re.compile(r"[^\s\[\]{}\"](?:[^\n\[\]{}\"]{0,254}[^\s\[\]{}\"])?")
MAX_HEAD_CHARS = 512
"""Most characters from the trigger to the arguments of a named call."""
MAX_LISTED_HEAD_CHARS = 2048
"""More characters than a listed call has before its arguments (`json_calls.HEAD`)."""
BETWEEN = " \n\r\t,"
"""Characters between calls of a list."""


class MistralCalls:
    """Reader of the text behind a trigger."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._reader: NamedCall | CallList | None = None

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._reader is None:
            text = held.text[:MAX_HEAD_CHARS].lstrip()
            is_short = len(held.text) < MAX_HEAD_CHARS
            if is_short and not is_last and (not text or any(mark.startswith(text) for mark in (CALL_ID, ARGS))):
                return Step.WAIT
            is_list = text.startswith("[") and not text.startswith((CALLS, CALL_ID, ARGS))
            self._reader = CallList(self._calls) if is_list else NamedCall(self._calls)
        return self._reader.step(held, part, is_last)


class NamedCall:
    """Reader of a call written as a name and arguments."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._has_begun = False
        self._arguments: ArgumentsReader | None = None

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._arguments is not None:
            arguments, rest = self._arguments.feed(held.text, is_last=is_last)
            self._calls.add_arguments(part, arguments)
            held.text = rest or ""
            return Step.WAIT if rest is None else Step.OVER
        return self._begin_arguments(held, is_last) if self._has_begun else self._begin(held, part, is_last)

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        head = self._head(held.text)
        if head is not None:
            name, call_id, end = head
            self._calls.begin(part, name, call_id=call_id if is_short_id(call_id) else "")
            self._has_begun = True
            held.text = held.text[end:]
            return Step.AGAIN
        if not is_last and len(held.text) < MAX_HEAD_CHARS and not self._is_refused(held.text):
            return Step.WAIT
        part.content += CALLS
        return Step.OVER

    def _head(self, text: str) -> tuple[str, str, int] | None:
        """Return name, id and the end of both, None if the text is no complete head."""
        mark = MARK.search(text, 0, MAX_HEAD_CHARS)
        if mark is None or self._is_refused(text):
            return None
        name, call_id = text[: mark.start()].strip(), ""
        if mark[0] == CALL_ID:
            next_mark = MARK.search(text, mark.end(), MAX_HEAD_CHARS)
            if next_mark is None:
                return None
            call_id, mark = text[mark.end() : next_mark.start()].strip(), next_mark
        return name, call_id, mark.end() if mark[0] == ARGS else mark.start()

    def _is_refused(self, text: str) -> bool:
        """Tell whether a text with a complete name cannot be a call."""
        mark = MARK.search(text, 0, MAX_HEAD_CHARS)
        is_named = mark is None or (mark[0] != CALLS and NAME.fullmatch(text[: mark.start()].strip()))
        return self._calls.is_full or not is_named

    def _begin_arguments(self, held: HeldText, is_last: bool) -> Step:
        held.text = text = held.text.lstrip()
        if not text and not is_last:
            return Step.WAIT
        if not text.startswith("{"):
            return Step.OVER
        self._arguments = ArgumentsReader(CALLS)
        return Step.AGAIN


class CallList:
    """Reader of a JSON list of calls."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._has_begun = False
        self._call: ListedCall | None = None

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._call is not None:
            step = self._call.step(held, part, is_last)
            if step is not Step.OVER:
                return step
            self._call = None
            return Step.AGAIN
        return self._find(held, part, is_last)

    def _find(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Find the next call of the list, or the list's end."""
        if self._has_begun:
            held.text = text = held.text.lstrip(BETWEEN)
        else:
            text = held.text[held.text.index("[") + 1 : MAX_HEAD_CHARS].lstrip()
        if not text and not is_last and (self._has_begun or len(held.text) < MAX_HEAD_CHARS):
            return Step.WAIT
        if text.startswith("{") and not self._calls.is_full:
            self._call = ListedCall(self._calls, "" if self._has_begun else f"{CALLS}[")
            held.text, self._has_begun = held.text[held.text.index("{") :], True
            return Step.AGAIN
        if not self._has_begun:
            part.content += CALLS
            return Step.OVER
        held.text = text.removeprefix("]")
        return Step.OVER


class ListedCall:
    """Reader of a call of a list.

    Args:
        before: text before the call, which is content if the first call of the list is none.
    """

    def __init__(self, calls: CallWriter, before: str) -> None:
        self._calls, self._before = calls, before
        self._head = ""
        self._pieces: list[str] = []  # of a call without the usual beginning
        self._reader = ArgumentsReader("")  # of that call, of the arguments, then of the text behind the arguments
        self._is_argument, self._is_behind = False, False

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if not self._is_argument and not self._is_behind and self._begin(held, part):
            return Step.AGAIN
        read, rest = self._reader.feed(held.text, is_last=is_last)
        held.text = rest or ""
        if self._is_argument:
            self._calls.add_arguments(part, read)
        elif not self._is_behind:
            self._pieces.append(read)
        if rest is None:
            return Step.WAIT
        if self._is_argument:
            self._reader = ArgumentsReader("", depth=1)
            self._is_argument, self._is_behind = False, True
            return Step.AGAIN
        if not self._is_behind:
            self._take_whole(part)
        return Step.OVER

    def _begin(self, held: HeldText, part: Part) -> bool:
        """Begin the call if its head is complete; the text is the whole call so far only before any was read."""
        if len(self._head) > MAX_LISTED_HEAD_CHARS:
            return False
        self._head += held.text
        head = head_of(self._head)
        if head is None:
            return False
        name, end = head
        self._calls.begin(part, name)
        held.text, self._pieces = self._head[end:], []
        self._reader, self._is_argument = ArgumentsReader(""), True
        return True

    def _take_whole(self, part: Part) -> None:
        text = "".join(self._pieces)
        calls = whole_calls(text, 1)
        for name, arguments in calls:
            self._calls.begin(part, name, arguments)
        if not calls:
            part.content += self._before + text


def with_short_ids(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return messages whose calls have ids that the templates take; equal ids stay equal."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: JsonObject) -> JsonObject:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [_call_with_short_id(call) for call in message["tool_calls"]]
    return changed


def _call_with_short_id(call: Json) -> Json:
    assert isinstance(call, dict), "messages are checked"
    return call | {"id": _short(str(call.get("id") or json.dumps(call, sort_keys=True)))}


def _short(call_id: str) -> str:
    """Return an id as it is if it is short, else a short hash of the id."""
    if is_short_id(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="surrogatepass")).digest())
    return "".join(ID_CHARS[number // len(ID_CHARS) ** place % len(ID_CHARS)] for place in range(SHORT_ID_CHARS))
