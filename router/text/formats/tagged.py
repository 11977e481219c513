"""Answers with tags around thoughts and before calls."""

from collections.abc import Callable, Mapping
from enum import Enum

from router.text.formats.parts import CallReader, HeldText, Part, Step
from router.text.formats.shapes import Thoughts, ThoughtTags

MAX_BLANKS = 256
"""Most white space before thoughts and before calls at the beginning of an answer."""


class Section(Enum):
    """Part of an answer at which the reader stands."""

    START = "start"  # nothing but white space so far
    THOUGHT = "thought"
    CONTENT = "content"
    CALL = "call"


class TaggedAnswer:
    """Reader of an answer: thoughts between tags, then content, and calls behind a trigger.

    Args:
        tags: around thoughts.
        trigger: before each call; "": no calls, or calls at the beginning of an answer only.
        openers: texts that begin a call at the beginning of an answer, each with whether it belongs to the call.
        new_reader: makes the reader of a call.
    """

    def __init__(
        self,
        thoughts: Thoughts,
        tags: ThoughtTags,
        trigger: str,
        openers: Mapping[str, bool],
        new_reader: Callable[[], CallReader],
    ) -> None:
        is_thinking = thoughts == "have begun"
        self._tags, self._trigger, self._new_reader = tags, trigger, new_reader
        self._call_openers = openers
        self._openers = [*([tags.begin] if thoughts else []), *openers]
        self._section = Section.THOUGHT if is_thinking else Section.START
        self._reader = new_reader()
        self.held = HeldText(follows_tag=is_thinking)

    cut_header = ""

    @property
    def holds_content(self) -> bool:
        return self._section in (Section.START, Section.CONTENT) and bool(self.held.text.strip())

    def step(self, part: Part, is_last: bool) -> bool:
        """Add the next certain part to the empty `part`; tell whether another may follow."""
        match self._section:
            case Section.START:
                return self._start(is_last)
            case Section.THOUGHT:
                return self._thought(part, is_last)
            case Section.CONTENT:
                return self._content(part, is_last)
            case Section.CALL:
                return self._call(part, is_last)

    def _start(self, is_last: bool) -> bool:
        """Find the section that begins; return False while unknown."""
        text = self.held.text.lstrip()
        if len(self.held.text) - len(text) > MAX_BLANKS:
            self._section = Section.CONTENT
            return True
        for opener in self._openers:
            if text.startswith(opener):
                is_call = opener in self._call_openers
                self.held.text = self.held.text if is_call and self._call_openers[opener] else text[len(opener) :]
                self._section, self.held.follows_tag = Section.CALL if is_call else Section.THOUGHT, True
                return True
        if not is_last and self._openers and (not text or any(each.startswith(text) for each in self._openers)):
            return False
        self._section = Section.CONTENT
        return True

    def _thought(self, part: Part, is_last: bool) -> bool:
        text, is_over = self.held.until(self._tags.end, is_last)
        part.thought += text
        if is_over:
            self._openers = [*self._call_openers]
            self._section, self.held.follows_tag = Section.START, True
        return is_over

    def _content(self, part: Part, is_last: bool) -> bool:
        if not self._trigger and not self.held.follows_tag:
            part.content += self.held.text
            self.held.text = ""
            return False
        text, is_over = self.held.until(self._trigger, is_last)
        part.content += text
        if is_over:
            self._section, self._reader = Section.CALL, self._new_reader()
        return is_over

    def _call(self, part: Part, is_last: bool) -> bool:
        step = self._reader.step(self.held, part, is_last)
        if step in (Step.OVER, Step.TEXT):
            self._section, self.held.follows_tag = Section.CONTENT, step is Step.OVER
        if step is Step.TEXT:
            part.content = self._trigger + part.content
        return step is not Step.WAIT
