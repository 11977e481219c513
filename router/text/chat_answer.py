"""Incremental parser of an answer's text: thoughts, content and tool calls.

Invariant: the concatenated results of `feed` do not depend on how the text is cut into pieces. Text resembling a call
without being a call is content. If calls are forced, an answer has no content.
"""

from collections.abc import Sequence
from types import MappingProxyType

from router.text.formats.parts import MAX_CALLS, SHORT_ID_CHARS, CallWriter, Part, joined
from router.text.formats.registry import FORMATS
from router.text.formats.shapes import NEW_ID, SHAPES, THINK_TAGS, Thoughts, ThoughtTags, ToolFormat
from router.text.formats.typed_values import ToolSchemas

MAX_PIECE_CHARS = 4096
"""Characters given to a reader at once, because each of its steps copies the rest."""
NO_SCHEMAS: ToolSchemas = MappingProxyType({})


class ForcedCalls:
    """Filter for an answer that must call one of the tools `names`: content is dropped."""

    def __init__(self, names: Sequence[str], tool_format: ToolFormat) -> None:
        self._openings = {name: SHAPES[tool_format].opening(name) for name in names}
        self._max_chars = max(map(len, self._openings.values())) + SHORT_ID_CHARS
        self._dropped = ""  # beginning of the content

    def drop_content(self, parts: list[Part]) -> None:
        for part in parts:
            self._dropped = (self._dropped + part.content).lstrip()[: self._max_chars]
            part.content = ""

    def call_begun(self, part: Part, cut_header: str, calls: CallWriter) -> None:
        """At the end of an answer without calls, call the tool that the dropped text begins to call, if only one fits.

        `cut_header` is dropped text that was no content.
        """
        text = cut_header or self._dropped
        begun = [name for name, opening in self._openings.items() if text and _fits(text, opening)]
        if len(begun) == 1 and not calls.num_calls:
            calls.begin(part, begun[0])


def _fits(text: str, opening: str) -> bool:
    """Tell whether the text is a beginning of the opening, or goes on with a new id where the opening has one."""
    before_id, new_id, _ = opening.partition(NEW_ID)
    return opening.startswith(text) or bool(new_id and text.startswith(before_id))


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
        found = FORMATS[calls_format]
        self._calls = CallWriter(found.new_id, MAX_CALLS if takes_calls else 0)
        self._reader = found.new_reader(thoughts, tags, self._calls, schemas)
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
        return joined(self.parts(text, is_last=is_last))

    def parts(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the results of `feed` in written order, each part of a single kind."""
        parts: list[Part] = []
        for begin in range(0, max(len(text), 1), MAX_PIECE_CHARS):
            self._reader.held.text += text[begin : begin + MAX_PIECE_CHARS]
            parts.append(Part())
            while self._reader.step(parts[-1], is_last and begin + MAX_PIECE_CHARS >= len(text)):
                parts.append(Part())
        if not self._tells_thoughts:
            for part in parts:
                part.thought = ""
        if self._forced:
            self._forced.drop_content(parts)
            if is_last:
                self._forced.call_begun(parts[-1], self._reader.cut_header, self._calls)
        return [part for part in parts if part.thought or part.content or part.calls]
