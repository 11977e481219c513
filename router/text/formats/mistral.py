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
from router.text.formats.json_calls import CallObjects
from router.text.formats.parts import (
    ID_CHARS,
    MAX_HEAD_CHARS,
    SHORT_ID_CHARS,
    CallWriter,
    HeldText,
    Part,
    Step,
    begun,
    is_short_id,
    read_head,
)
from router.text.formats.shapes import ARGS, CALL_ID, CALLS

SPACE = r"\s{0,32}"
NAME = rf"{SPACE}(?P<name>[^\s\[\]{{}}](?:[^\n\[\]{{}}]{{0,254}}[^\s\[\]{{}}])?)[ \t]{{0,32}}"
ID = rf"{re.escape(CALL_ID)}(?P<id>[^\[\]{{}}\n]{{0,64}})"
ARGS_MARK = re.escape(ARGS)
ENDS = rf"(?:{ARGS_MARK})?{SPACE}(?=\{{)|{ARGS_MARK}{SPACE}(?P<none>(?={re.escape(CALLS)}))"
HEAD = re.compile(rf"{NAME}(?:{ID})?(?:{ENDS})")
"""Beginning of a named call, up to its arguments, or up to the next call if there are none."""
LAST_HEAD = re.compile(rf"{NAME}(?:{ID})?(?:{ENDS}|{ARGS_MARK}{SPACE}\Z)")
"""Beginning of a named call that may be cut off before the arguments."""
BEGUN_HEAD = re.compile(rf"[^\[\]{{}}]*(?:{begun(CALL_ID)}|(?:{ID}\s*)?(?:{begun(ARGS)}|{ARGS_MARK}\s*{begun(CALLS)}))")
"""Every text that such a beginning may begin with, and some more."""


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
        if rest is None:
            return Step.WAIT
        self._calls.end()
        return Step.OVER

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Begin the call if its head is complete, or content if the text cannot become a call."""
        head = read_head(LAST_HEAD if is_last else HEAD, BEGUN_HEAD, held, self._calls, is_last)
        if isinstance(head, Step):
            return head
        call_id = (head["id"] or "").strip()
        self._calls.begin(part, head["name"], call_id=call_id if is_short_id(call_id) else "")
        self._arguments = ArgumentsReader(CALLS)
        if head["none"] is None:
            return Step.AGAIN
        self._calls.add_arguments(part, "{}")
        self._calls.end()
        return Step.OVER


class CallList:
    """Reader of a JSON list of calls."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = CallObjects(calls, separators=" \n\r\t,")
        self._begin = ""  # of the list, once it has been read

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if not self._begin:
            size = held.text.index("[") + 1
            self._begin, held.text = held.text[:size], held.text[size:]
        step = self._calls.step(held, part, is_last)
        if step is Step.OVER:
            held.text = held.text.removeprefix("]")
        elif step is Step.TEXT:
            held.text = self._begin + held.text
        return step


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
