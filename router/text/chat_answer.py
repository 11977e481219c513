"""Incremental parser of an answer's text: thoughts, content and tool calls.

Invariant: the concatenated results of `feed` do not depend on how the text is cut into pieces. Text resembling a call
without being a call is content. If calls are forced, an answer has no content.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
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
    ToolSchemas,
    head_of,
    num_begun,
    whole_calls,
    xml_call,
)

Thoughts = Literal["", "may come", "have begun"]
"""Thoughts at the beginning of an answer. "have begun" means the opening tag is in the prompt."""
THINK, THINK_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
NO_SCHEMAS: ToolSchemas = MappingProxyType({})
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


class CallWriter:
    """Writer of calls into parts, numbered within the answer."""

    def __init__(self) -> None:
        self.num_calls = 0

    def begin(self, part: Part, name: str, arguments: str = "") -> None:
        part.calls.append(CallPiece(self.num_calls, arguments, f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1

    def add_arguments(self, part: Part, arguments: str) -> None:
        """Add arguments to the call begun last."""
        if arguments:
            part.calls.append(CallPiece(self.num_calls - 1, arguments))

    def take(self, part: Part, text: str) -> bool:
        """Take calls if the whole text consists of calls; return False otherwise."""
        calls = whole_calls(text, MAX_CALLS - self.num_calls)
        for name, arguments in calls:
            self.begin(part, name, arguments)
        return bool(calls)


class ForcedCalls:
    """Filter for an answer that must call one of the tools `names`: content is dropped."""

    def __init__(self, names: Sequence[str], tool_format: ToolFormat) -> None:
        self._names, self._format = names, tool_format
        self._dropped = ""

    def drop_content(self, parts: list[Part], calls: CallWriter, *, is_last: bool) -> None:
        """Drop content; at the end, call the tool that dropped text begins to call, if only one tool fits."""
        for part in parts:
            self._dropped += part.content
            part.content = ""
        if is_last and self._dropped.strip() and not calls.num_calls:
            opening, text = SHAPES[self._format].opening, self._dropped.lstrip()
            begun = [name for name in self._names if opening(name).startswith(text)]
            if len(begun) == 1:
                calls.begin(parts[-1], begun[0])


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


class HeldText:
    """Text not yet assigned to a part; line breaks next to a tag are dropped."""

    def __init__(self, *, follows_tag: bool) -> None:
        self.text = ""
        self.follows_tag = follows_tag

    def until(self, tag: str, is_last: bool) -> tuple[str, bool]:
        """Take text certainly before `tag`, and tell whether `tag` has come; a tag of "" never comes."""
        if self.follows_tag:
            self.text = self.text.lstrip("\n")
            self.follows_tag = not self.text
        if tag and tag in self.text:
            before, _, self.text = self.text.partition(tag)
            return before.rstrip("\n"), True
        num_tag = 0 if is_last else num_begun(self.text, tag)
        text = self.text[: len(self.text) - num_tag]
        sure = text if is_last or not tag else text.rstrip("\n")
        self.text = self.text[len(sure) :]
        return sure, False


class AnswerParser:
    """Parser of the answer of a choice.

    Args:
        thoughts: whether thoughts may come, or have begun.
        tells_thoughts: whether thoughts are part of the answer.
        tool_format: format of calls, "" if tools may not be called.
        forced: names of tools; the answer must call one and has no content.
        schemas: of the tools' parameters, for a format whose values have no type of their own.
    """

    def __init__(
        self,
        *,
        thoughts: Thoughts,
        tool_format: str,
        tells_thoughts: bool = True,
        forced: Sequence[str] = (),
        schemas: ToolSchemas = NO_SCHEMAS,
    ) -> None:
        self._schemas = schemas
        is_thinking = thoughts == "have begun"
        self._openers: dict[str, Section] = {THINK: Section.THOUGHT} if thoughts else {}
        self._format = ToolFormat(tool_format)
        self._has_tags = self._format in (ToolFormat.HERMES, ToolFormat.XML)
        if self._format is ToolFormat.LLAMA:
            self._openers |= {PYTHON_TAG: Section.CALL, "{": Section.CALL}
        self._tells_thoughts = tells_thoughts
        self._forced = ForcedCalls(forced, self._format) if forced else None
        self._section = Section.THOUGHT if is_thinking else Section.START
        self._held = HeldText(follows_tag=is_thinking)
        self._calls = CallWriter()
        self._arguments, self._end_tag = ArgumentsReader(""), EndTag()  # of the current call

    @property
    def has_called(self) -> bool:
        return self._calls.num_calls > 0

    @property
    def holds_content(self) -> bool:
        """True while text is withheld that may become content."""
        return self._section in (Section.START, Section.CONTENT) and bool(self._held.text.strip())

    def feed(self, text: str, *, is_last: bool = False) -> Part:
        """Return all certain results after this text; with `is_last`, also the rest."""
        whole = Part()
        for part in self.parts(text, is_last=is_last):
            whole.add(part)
        return whole

    def parts(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the results of `feed` in written order, each part of a single kind."""
        self._held.text += text
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
            self._forced.drop_content(parts, self._calls, is_last=is_last)
        return [part for part in parts if part.thought or part.content or part.calls]

    def _start(self, part: Part, is_last: bool) -> bool:
        """Find the section that begins; return False while unknown."""
        text = self._held.text.lstrip()
        for opener, section in self._openers.items():
            if text.startswith(opener):
                self._held.text = self._held.text if opener == "{" else text[len(opener) :]
                self._section, self._held.follows_tag = section, True
                return True
        if not is_last and self._openers and (not text or any(each.startswith(text) for each in self._openers)):
            return False
        self._section = Section.CONTENT
        return True

    def _thought(self, part: Part, is_last: bool) -> bool:
        text, is_over = self._held.until(THINK_END, is_last)
        part.thought += text if self._tells_thoughts else ""
        if is_over:
            self._openers.pop(THINK, None)
            self._section, self._held.follows_tag = Section.START, True
        return is_over

    def _content(self, part: Part, is_last: bool) -> bool:
        if not self._has_tags and not self._held.follows_tag:
            part.content += self._held.text
            self._held.text = ""
            return False
        text, is_over = self._held.until(CALL if self._has_tags else "", is_last)
        part.content += text
        if is_over:
            self._section = Section.CALL
        return is_over

    def _call(self, part: Part, is_last: bool) -> bool:
        if self._format is ToolFormat.XML:
            return self._xml_call(part, is_last)
        head = head_of(self._held.text) if self._calls.num_calls < MAX_CALLS else None
        if head is None and self._format is ToolFormat.HERMES:
            return self._whole_call(part, is_last)
        if head is None:
            if is_last:  # the whole rest is either calls or content
                part.content += "" if self._calls.take(part, self._held.text) else self._held.text
                self._held.text = ""
            return False
        name, end = head
        self._calls.begin(part, name)
        self._held.text = self._held.text[end:]
        self._arguments = ArgumentsReader(END_TAGS[self._format])
        self._section = Section.ARGUMENTS
        return True

    def _xml_call(self, part: Part, is_last: bool) -> bool:
        """Take a call of parameters between tags, once its end tag has come."""
        inside, tag, behind = self._held.text.partition(CALL_END)
        if not tag and not is_last:
            return False
        call = xml_call(inside, self._schemas) if self._calls.num_calls < MAX_CALLS else None
        if call is None:
            part.content += CALL + inside + tag
        else:
            self._calls.begin(part, call.name, call.arguments)
        self._held.text = behind
        self._section, self._held.follows_tag = Section.CONTENT, True
        return True

    def _argue(self, part: Part, is_last: bool) -> bool:
        arguments, rest = self._arguments.feed(self._held.text, is_last=is_last)
        self._calls.add_arguments(part, arguments)
        self._held.text = rest or ""
        if rest is None:
            return False
        self._section = Section.AFTER
        return True

    def _after(self, part: Part, is_last: bool) -> bool:
        """Drop the end of a call; text behind the last call is content."""
        between = AFTER.match(self._held.text)
        assert between is not None, "it matches nothing, too"
        rest = self._held.text[between.end() :]
        if not rest and not is_last:
            return False
        if between[1] and rest.startswith("{"):
            self._held.text = rest
            self._section = Section.CALL
            return True
        if self._format is ToolFormat.HERMES:
            before, tag, behind = rest.partition(CALL_END)
            if not tag and not is_last:
                return False
            rest = behind if tag else before[: len(before) - num_begun(before, CALL_END)]
        self._held.text = rest
        self._section, self._held.follows_tag = Section.CONTENT, True
        return True

    def _whole_call(self, part: Part, is_last: bool) -> bool:
        """Take a call without the usual beginning, once its end tag has come."""
        held = self._held.text
        end = self._end_tag.find(held)
        if end < 0 and not is_last:
            return False
        is_call = self._calls.take(part, held if end < 0 else held[:end])
        if not is_call:
            end = held.find(CALL_END)
        whole = held if end < 0 else held[: end + len(CALL_END)]
        self._held.text = held[len(whole) :]
        if not is_call:
            part.content += CALL + whole
        self._end_tag = EndTag()
        self._section, self._held.follows_tag = Section.CONTENT, True
        return True
