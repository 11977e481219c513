"""Incremental parser of an answer's text: thoughts, content and tool calls.

Invariant: the concatenated results of `feed` do not depend on how the text is cut into pieces. Text resembling a call
without being a call is content. If calls are forced, an answer has no content.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from router.text.tool_calls import (
    AFTER,
    CALL,
    CALL_END,
    END_TAGS,
    ESCAPED,
    SHAPES,
    ArgumentsReader,
    ToolFormat,
    head_of,
    num_begun,
    whole_calls,
)

Thoughts = Literal["", "may come", "have begun"]
"""Thoughts at the beginning of an answer. "have begun" means the opening tag is in the prompt."""
THINK, THINK_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
MAX_CALLS = 128
"""Calls of an answer; further text is content."""


class Section(Enum):
    """Part of an answer at which the parser stands."""

    START = "start"  # nothing but white space so far
    THOUGHT = "thought"
    CONTENT = "content"
    CALL = "call"  # a call before its arguments
    ARGUMENTS = "arguments"
    AFTER = "after"  # behind the arguments of a call


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

    def add(self, other: "Part") -> None:
        """Append a later part."""
        self.thought += other.thought
        self.content += other.content
        for piece in other.calls:
            if self.calls and self.calls[-1].index == piece.index:
                self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + piece.arguments)
            else:
                self.calls.append(piece)


class AnswerParser:
    """Parser of the answer of a choice.

    Args:
        thoughts: whether thoughts may come, or have begun.
        tells_thoughts: whether thoughts are part of the answer.
        tool_format: format of calls, "" if tools may not be called.
        forced: names of tools; the answer must call one and has no content.
    """

    def __init__(
        self, *, thoughts: Thoughts, tool_format: str, tells_thoughts: bool = True, forced: Sequence[str] = ()
    ) -> None:
        is_thinking = thoughts == "have begun"
        self._openers: dict[str, Section] = {THINK: Section.THOUGHT} if thoughts else {}
        self._format = ToolFormat(tool_format)
        if self._format is ToolFormat.LLAMA:
            self._openers |= {PYTHON_TAG: Section.CALL, "{": Section.CALL}
        self._tells_thoughts = tells_thoughts
        self._forced = forced
        self._unsaid = ""  # with `forced`: text that may begin a call
        self._section = Section.THOUGHT if is_thinking else Section.START
        self._held = ""
        self._follows_tag = is_thinking  # line breaks next to a tag are dropped
        self._num_calls = 0
        self._arguments = ArgumentsReader("")
        self._quoted = 0  # characters of a call up to and including a tag in a string
        self._is_quoted = False

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    @property
    def holds_content(self) -> bool:
        """True while text is withheld that may become content."""
        return self._section in (Section.START, Section.CONTENT) and bool(self._held.strip())

    def feed(self, text: str, *, is_last: bool = False) -> Part:
        """Return all certain results after this text; with `is_last`, also the rest."""
        whole = Part()
        for part in self.parts(text, is_last=is_last):
            whole.add(part)
        return whole

    def parts(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the results of `feed` in written order, each part of a single kind."""
        self._held += text
        steps = {
            Section.START: self._start,
            Section.THOUGHT: self._thought,
            Section.CONTENT: self._content,
            Section.CALL: self._call,
            Section.ARGUMENTS: self._argue,
            Section.AFTER: self._after,
        }
        parts = [Part()]
        while steps[self._section](parts[-1], is_last):
            parts.append(Part())
        if self._forced:
            self._say_nothing(parts, is_last)
        return [part for part in parts if part.thought or part.content or part.calls]

    def _say_nothing(self, parts: list[Part], is_last: bool) -> None:
        """Drop content; at the end, call the tool that dropped text begins to call, if only one tool fits."""
        for part in parts:
            self._unsaid += part.content
            part.content = ""
        if is_last and self._unsaid.strip() and not self.has_called:
            self._call_what_was_begun(parts[-1])

    def _start(self, part: Part, is_last: bool) -> bool:
        """Find the section that begins; return False while unknown."""
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
        part.thought += text if self._tells_thoughts else ""
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
        head = head_of(self._held) if self._num_calls < MAX_CALLS else None
        if head is None:
            return self._whole_call(part, is_last) if self._format is ToolFormat.HERMES else self._rest(part, is_last)
        name, end = head
        self._begin_call(part, name, "")
        self._held = self._held[end:]
        self._arguments = ArgumentsReader(END_TAGS[self._format])
        self._section = Section.ARGUMENTS
        return True

    def _argue(self, part: Part, is_last: bool) -> bool:
        arguments, rest = self._arguments.feed(self._held, is_last=is_last)
        if arguments:
            part.calls.append(CallPiece(self._num_calls - 1, arguments))
        self._held = rest or ""
        if rest is None:
            return False
        self._section = Section.AFTER
        return True

    def _after(self, part: Part, is_last: bool) -> bool:
        """Drop the end of a call; text behind the last call is content."""
        between = AFTER.match(self._held)
        assert between is not None, "it matches nothing, too"
        rest = self._held[between.end() :]
        if not rest and not is_last:
            return False
        if between[1] and rest.startswith("{"):
            self._held = rest
            self._section = Section.CALL
            return True
        if self._format is ToolFormat.HERMES:
            before, tag, behind = rest.partition(CALL_END)
            if not tag and not is_last:
                return False
            rest = behind if tag else before[: len(before) - num_begun(before, CALL_END)]
        self._held = rest
        self._enter(Section.CONTENT)
        return True

    def _whole_call(self, part: Part, is_last: bool) -> bool:
        """Take a call without the usual beginning, once its end tag has come."""
        end = self._end_of_call()
        if end < 0 and not is_last:
            return False
        is_call = self._take(part, self._held if end < 0 else self._held[:end])
        if not is_call:
            end = self._held.find(CALL_END)
        whole = self._held if end < 0 else self._held[: end + len(CALL_END)]
        self._held = self._held[len(whole) :]
        if not is_call:
            part.content += CALL + whole
        self._quoted, self._is_quoted = 0, False
        self._enter(Section.CONTENT)
        return True

    def _end_of_call(self) -> int:
        """Find the end tag outside of the call's strings; return -1 before such a tag."""
        while (end := self._held.find(CALL_END, self._quoted)) >= 0:
            num_quotes = ESCAPED.sub("", self._held[self._quoted : end]).count('"')
            if self._is_quoted == num_quotes % 2:
                return end
            self._quoted, self._is_quoted = end + len(CALL_END), True
        return -1

    def _rest(self, part: Part, is_last: bool) -> bool:
        """Take the whole rest, either calls or content."""
        if is_last:
            part.content += "" if self._take(part, self._held) else self._held
            self._held = ""
        return False

    def _take(self, part: Part, text: str) -> bool:
        """Take calls if the whole text consists of calls; return False otherwise."""
        calls = whole_calls(text, MAX_CALLS - self._num_calls)
        for name, arguments in calls:
            self._begin_call(part, name, arguments)
        return bool(calls)

    def _begin_call(self, part: Part, name: str, arguments: str) -> None:
        part.calls.append(CallPiece(self._num_calls, arguments, f"call_{secrets.token_hex(12)}", name))
        self._num_calls += 1

    def _call_what_was_begun(self, part: Part) -> None:
        """Call the tool that the written text begins to call; do nothing if several tools fit."""
        shape = SHAPES[self._format]
        names = [name for name in self._forced if shape.opening(name).startswith(self._unsaid.lstrip())]
        if len(names) == 1:
            self._begin_call(part, names[0], "")

    def _enter(self, section: Section) -> None:
        self._section = section
        self._follows_tag = True

    def _until(self, tag: str, is_last: bool) -> tuple[str, bool]:
        """Return text certainly before `tag`, and whether `tag` has come; a tag of "" never comes."""
        if self._follows_tag:
            self._held = self._held.lstrip("\n")
            self._follows_tag = not self._held
        if tag and tag in self._held:
            before, _, self._held = self._held.partition(tag)
            return before.rstrip("\n"), True
        num_tag = 0 if is_last else num_begun(self._held, tag)
        text = self._held[: len(self._held) - num_tag]
        sure = text if is_last or not tag else text.rstrip("\n")
        self._held = self._held[len(sure) :]
        return sure, False
