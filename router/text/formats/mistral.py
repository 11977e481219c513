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


def _begun(tag: str) -> str:
    """Return an expression for the beginnings of a tag, the empty one included."""
    return "(?:" + "".join(f"(?:{re.escape(char)}" for char in tag[:-1]) + ")?" * len(tag[:-1]) + ")"


NAME = r"\s*(?P<name>[^\s\[\]{}](?:[^\n\[\]{}]{0,254}[^\s\[\]{}])?)[ \t]*"
ID = rf"{re.escape(CALL_ID)}(?P<id>[^\[\]{{}}\n]{{0,64}})"
HEAD = re.compile(rf"{NAME}(?:{ID})?(?:{re.escape(ARGS)})?\s*(?=\{{)")
"""Beginning of a named call, up to its arguments."""
BEGUN = re.compile(rf"[^\[\]{{}}]*(?:{_begun(CALL_ID)}|(?:{ID}\s*)?(?:{_begun(ARGS)}|{re.escape(ARGS)}\s*))")
"""Every text that such a beginning may begin with, and some more."""
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
        self._arguments: ArgumentsReader | None = None

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._arguments is None:
            return self._begin(held, part, is_last)
        arguments, rest = self._arguments.feed(held.text, is_last=is_last)
        self._calls.add_arguments(part, arguments)
        held.text = rest or ""
        return Step.WAIT if rest is None else Step.OVER

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Begin the call if its head is complete, or content if the text cannot become a call."""
        text = held.text[:MAX_HEAD_CHARS]
        head = None if self._calls.is_full else HEAD.match(text)
        if head is not None:
            call_id = (head["id"] or "").strip()
            self._calls.begin(part, head["name"], call_id=call_id if is_short_id(call_id) else "")
            held.text = held.text[head.end() :]
            self._arguments = ArgumentsReader(CALLS)
            return Step.AGAIN
        may_come = not is_last and not self._calls.is_full and len(text) < MAX_HEAD_CHARS
        if may_come and BEGUN.fullmatch(text):
            return Step.WAIT
        part.content += CALLS
        return Step.OVER


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
            is_call, self._call = self._call.is_call, None
            return Step.AGAIN if is_call else Step.OVER
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

    Attributes:
        is_call: false if the text turned out to be content.
    """

    def __init__(self, calls: CallWriter, before: str) -> None:
        self._calls, self._before = calls, before
        self.is_call = True
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
            self.is_call = False


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
