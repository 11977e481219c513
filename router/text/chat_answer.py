"""Incremental parser of an answer's text: thoughts, content and tool calls.

Invariant: the concatenated results of `feed` do not depend on how the text is cut into pieces. Text resembling a call
without being a call is content. If calls are forced, an answer has no content.
"""

from collections.abc import Sequence
from types import MappingProxyType

from router.text.formats.parts import MAX_CALLS, CallWriter, Part
from router.text.formats.registry import FORMATS, answer_reader
from router.text.formats.shapes import SHAPES, THINK_TAGS, Thoughts, ThoughtTags, ToolFormat
from router.text.formats.typed_values import ToolSchemas

NO_SCHEMAS: ToolSchemas = MappingProxyType({})


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


class AnswerParser:
    """Parser of the answer of a choice.

    Args:
        thoughts: whether thoughts may come, or have begun.
        tags: around thoughts.
        tells_thoughts: whether thoughts are part of the answer.
        tool_format: format of calls, or of all answers of the model; "" for plain text.
        takes_calls: whether there are tools to call; otherwise calls are content.
        forced: names of tools; the answer must call one and has no content.
        schemas: of the tools' parameters, for a format whose values have no type of their own.
    """

    def __init__(
        self,
        *,
        thoughts: Thoughts,
        tool_format: str,
        takes_calls: bool = True,
        tags: ThoughtTags = THINK_TAGS,
        tells_thoughts: bool = True,
        forced: Sequence[str] = (),
        schemas: ToolSchemas = NO_SCHEMAS,
    ) -> None:
        calls_format = ToolFormat(tool_format)
        self._calls = CallWriter(FORMATS[calls_format].new_id, MAX_CALLS if takes_calls else 0)
        self._reader = answer_reader(calls_format, thoughts, tags, self._calls, schemas)
        self._tells_thoughts = tells_thoughts
        self._forced = ForcedCalls(forced, calls_format) if forced else None

    @property
    def has_called(self) -> bool:
        """True if the answer has calls, all of them complete."""
        return self._calls.num_calls > 0 and not self.is_calling

    @property
    def is_calling(self) -> bool:
        """True inside of a call; also at the end, if the call is cut off."""
        return self._calls.is_open

    @property
    def holds_content(self) -> bool:
        """True while text is withheld that may become content."""
        return self._reader.holds_content

    def feed(self, text: str, *, is_last: bool = False) -> Part:
        """Return all certain results after this text; with `is_last`, also the rest."""
        whole = Part()
        for part in self.parts(text, is_last=is_last):
            whole.add(part)
        return whole

    def parts(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the results of `feed` in written order, each part of a single kind."""
        self._reader.held.text += text
        parts = [Part()]
        while self._reader.step(parts[-1], is_last):
            parts.append(Part())
        if not self._tells_thoughts:
            for part in parts:
                part.thought = ""
        if self._forced:
            self._forced.drop_content(parts, self._calls, is_last=is_last)
        return [part for part in parts if part.thought or part.content or part.calls]
