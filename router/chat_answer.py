"""The text of an answer taken apart, as it comes: what was thought, what is said, which tools are called.

Invariant: what `feed` and `flush` return, put together, does not depend on how the text is cut into pieces. What
looks like a call and is none is said.
"""

import json
import re
import secrets
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

from router.shapes import CalledFunction, ToolCall

Thoughts = Literal["", "may come", "have begun"]
"""At the beginning of an answer, between tags; those that have begun have the first tag in the prompt."""
THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
ESCAPED = re.compile(r"\\.", re.DOTALL)
"""In a string of JSON."""
MAX_CALLS = 128
"""Of an answer; what follows is said."""


class ToolFormat(StrEnum):
    """How a model writes calls."""

    NONE = ""
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen3 does
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} and nothing else, as Llama 3 does


class Section(Enum):
    START = "start"  # nothing but white space so far
    THOUGHT = "thought"
    CONTENT = "content"
    CALL = "call"
    CALLS_ALONE = "calls alone"


@dataclass(slots=True)
class Part:
    """Of an answer."""

    thought: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerParser:
    """The answer of one choice."""

    def __init__(self, *, thoughts: Thoughts, tool_format: str) -> None:
        is_thinking = thoughts == "have begun"
        self._openers: dict[str, Section] = {THINK: Section.THOUGHT} if thoughts else {}
        self._format = ToolFormat(tool_format)
        if self._format is ToolFormat.LLAMA:
            self._openers |= {PYTHON_TAG: Section.CALLS_ALONE, "{": Section.CALLS_ALONE}
        self._section = Section.THOUGHT if is_thinking else Section.START
        self._held = ""
        self._follows_tag = is_thinking  # line breaks next to tags belong to them
        self._num_calls = 0
        self._quoted = 0  # characters of a call up to a tag that is in a string of it, and that
        self._is_quoted = False

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str, *, is_last: bool = False) -> Part:
        """What is certain after this text; with `is_last`, all the rest."""
        self._held += text
        part = Part()
        steps = {
            Section.START: self._start,
            Section.THOUGHT: self._thought,
            Section.CONTENT: self._content,
            Section.CALL: self._call,
            Section.CALLS_ALONE: self._calls_alone,
        }
        while steps[self._section](part, is_last):
            pass
        return part

    def _start(self, part: Part, is_last: bool) -> bool:
        """Find out what comes; true if it is known."""
        text = self._held.lstrip()
        for opener, section in self._openers.items():
            if text.startswith(opener):
                self._held = self._held if opener == "{" else text[len(opener) :]
                self._enter(section)
                return True
        if not is_last and self._openers and (not text or any(each.startswith(text) for each in self._openers)):
            return False
        self._section = Section.CONTENT
        return True

    def _thought(self, part: Part, is_last: bool) -> bool:
        text, is_over = self._until(THINK_END, is_last)
        part.thought += text
        if is_over:
            self._openers.pop(THINK, None)
            self._enter(Section.START)
        return is_over

    def _content(self, part: Part, is_last: bool) -> bool:
        if self._format is not ToolFormat.HERMES and not self._follows_tag:
            part.content += self._held
            self._held = ""
            return False
        text, is_over = self._until(CALL if self._format is ToolFormat.HERMES else "", is_last)
        part.content += text
        if is_over:
            self._section = Section.CALL
        return is_over

    def _call(self, part: Part, is_last: bool) -> bool:
        end = self._end_of_call()
        if end < 0 and not is_last:
            return False
        calls = self._calls(self._held if end < 0 else self._held[:end])
        if not calls:
            end = self._held.find(CALL_END)
        whole = self._held if end < 0 else self._held[: end + len(CALL_END)]
        self._held = self._held[len(whole) :]
        part.calls += calls
        if not calls:
            part.content += CALL + whole
        self._quoted, self._is_quoted = 0, False
        self._enter(Section.CONTENT)
        return True

    def _end_of_call(self) -> int:
        """Where the tag begins that is in no string of the call; -1 while it has not come."""
        while (end := self._held.find(CALL_END, self._quoted)) >= 0:
            num_quotes = ESCAPED.sub("", self._held[self._quoted : end]).count('"')
            if self._is_quoted == num_quotes % 2:
                return end
            self._quoted, self._is_quoted = end + len(CALL_END), True
        return -1

    def _calls_alone(self, part: Part, is_last: bool) -> bool:
        if is_last:
            calls = self._calls(self._held)
            part.calls += calls
            part.content += "" if calls else self._held
            self._held = ""
        return False

    def _calls(self, text: str) -> list[ToolCall]:
        """Those that the whole text is, one after the other, a semicolon between them at most; else none."""
        calls: list[ToolCall] = []
        decoder, text = json.JSONDecoder(), text.strip()
        while text:
            try:
                value, end = decoder.raw_decode(text)
                function = _called(value)
            except (ValueError, RecursionError):
                return []
            index = self._num_calls + len(calls)
            if function is None or index >= MAX_CALLS:
                return []
            calls.append(
                {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            )
            text = text[end:].lstrip().removeprefix(";").lstrip()
        self._num_calls += len(calls)
        return calls

    def _enter(self, section: Section) -> None:
        self._section = section
        self._follows_tag = True

    def _until(self, tag: str, is_last: bool) -> tuple[str, bool]:
        """What surely stands before `tag`, and whether it has come; "" never comes."""
        if self._follows_tag:
            self._held = self._held.lstrip("\n")
            self._follows_tag = not self._held
        if tag and tag in self._held:
            before, _, self._held = self._held.partition(tag)
            return before.rstrip("\n"), True
        num_tag = 0 if is_last else _num_begun(self._held, tag)
        text = self._held[: len(self._held) - num_tag]
        sure = text if is_last or not tag else text.rstrip("\n")
        self._held = self._held[len(sure) :]
        return sure, False


def _num_begun(text: str, tag: str) -> int:
    """Characters at the end that may be the beginning of the tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def _called(value: Any) -> CalledFunction | None:
    """Which function with what, if it is a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
