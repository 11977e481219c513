"""Calls of tools as models write them, and one call read as its text comes.

What begins as `{"name": "...", "arguments": {` is a call from there on, whatever follows, so its arguments can be told
while they are written. A call that begins in another way is known once it is whole.
"""

import json
import re
from enum import StrEnum
from typing import Any, NamedTuple

CALL, CALL_END = "<tool_call>", "</tool_call>"


class ToolFormat(StrEnum):
    """How a model writes calls."""

    NONE = ""
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen3 does
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} and nothing else, as Llama 3 does


class CallShape(NamedTuple):
    """The text of a call where a grammar forces it."""

    trigger: str
    before: str  # the name, behind the trigger
    between: str  # name and arguments
    behind: str
    end: str
    separator: str  # between calls

    def opening(self, name: str) -> str:
        """Return all that stands before the arguments of a call."""
        return f"{self.trigger}{self.before}{json.dumps(name, ensure_ascii=False)}{self.between}"


SHAPES = {
    ToolFormat.HERMES: CallShape(CALL, '\n{"name": ', ', "arguments": ', "}\n", CALL_END, "\n"),
    ToolFormat.LLAMA: CallShape("", '{"name": ', ', "parameters": ', "}", "", ""),
}
END_TAGS = {ToolFormat.NONE: "", ToolFormat.HERMES: CALL_END, ToolFormat.LLAMA: ""}

SPACE = r"[ \n\r\t]{0,64}"
HEAD = re.compile(
    rf'{SPACE}\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rf'"name"{SPACE}:{SPACE}("(?:[^"\\]|\\.){{0,256}}"){SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)',
    re.DOTALL,
)
"""The beginning of a call, up to its arguments; of bounded length, because it is looked for again at each token."""
AFTER = re.compile(r"[ \n\r\t]*(\}?)[ \n\r\t;]*")
"""Between the arguments of a call and what follows it."""
IN_STRING = re.compile(r'"|\\')
SIGNS = r'["{}\[\]]'
ESCAPED = re.compile(r"\\.", re.DOTALL)
"""In a string of JSON."""


def head_of(text: str) -> tuple[str, int] | None:
    """Name of the call with which a text begins, and where its arguments begin; None where neither is certain."""
    head = HEAD.match(text)
    if head is None:
        return None
    try:
        return str(json.loads(head[1])), head.end()
    except ValueError:
        return None


def whole_calls(text: str, max_calls: int) -> list[tuple[str, str]]:
    """Name and arguments of the calls that the whole text is, a semicolon between them at most; else none."""
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


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


class ArgumentsReader:
    """The arguments of one call, told as they come.

    Braces, brackets and strings are followed, nothing else: what a model writes between them is the client's to check.
    An end tag within a string is text of it, and held back until the string ends, because a string that never ends
    is a mistake of the model, and the tag then the end of the call.
    """

    def __init__(self, end_tag: str) -> None:
        self._end_tag = end_tag
        self._signs = re.compile(f"{SIGNS}|{re.escape(end_tag)}" if end_tag else SIGNS)
        self._held = ""
        self._at = 0  # what stands before it in `_held` has been followed
        self._string = -1  # where it begins in `_held`, or 0; -1: outside of strings
        self._depth = 0

    def feed(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return arguments that are certain, and the text behind the last of them once it has come."""
        self._held += text
        end = self._followed()
        if end is not None:
            return self._cut(end)
        sure = self._num_sure()
        if not is_last:
            told, self._held = self._held[:sure], self._held[sure:]
            self._at, self._string = self._at - sure, max(0, self._string - sure) if self._string >= 0 else -1
            return told, None
        is_cut_off = self._string >= 0 and not (self._end_tag and self._held.startswith(self._end_tag, sure))
        return self._cut(len(self._held) if is_cut_off else sure)

    def _followed(self) -> int | None:
        """Follow all that is held; return where the arguments end, if they do."""
        while True:
            found = (self._signs if self._string < 0 else IN_STRING).search(self._held, self._at)
            if found is None:
                num_held = num_begun(self._held, self._end_tag) if self._string < 0 else 0
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
        """Characters that are arguments whatever follows."""
        tag = self._held.find(self._end_tag, self._string) if self._string >= 0 and self._end_tag else -1
        return min(self._at, tag if tag >= 0 else len(self._held) - num_begun(self._held, self._end_tag))

    def _cut(self, end: int) -> tuple[str, str]:
        told, rest, self._held = self._held[:end], self._held[end:], ""
        return told, rest


def num_begun(text: str, tag: str) -> int:
    """Characters at the end of a text that may be the beginning of a tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
