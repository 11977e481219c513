"""Answers read by the parser: in one piece, and in pieces cut at every place."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from router.text.chat_answer import AnswerParser
from router.text.formats.parts import Part
from router.text.formats.shapes import (
    GEMMA_TAGS,
    HARMONY_TAGS,
    MISTRAL_FORMATS,
    MISTRAL_TAGS,
    THINK_TAGS,
    Thoughts,
    ThoughtTags,
    ToolFormat,
)  # fmt: skip
from router.text.formats.typed_values import ToolSchemas

MAX_PAIRED_CHARS = 40
"""Longest text read in all cuts into three pieces."""


class Answer(NamedTuple):
    """Everything a client gets: thoughts, content, and name and arguments of each call."""

    thought: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class Reading(NamedTuple):
    """Arguments of an `AnswerParser`, with the tags of the format."""

    tool_format: ToolFormat
    thoughts: Thoughts = "may come"
    schemas: ToolSchemas = {}  # noqa: RUF012 - nobody writes to it
    forced: Sequence[str] = ()

    @property
    def tags(self) -> ThoughtTags:
        tags = {ToolFormat.GEMMA: GEMMA_TAGS, ToolFormat.HARMONY: HARMONY_TAGS}
        return MISTRAL_TAGS if self.tool_format in MISTRAL_FORMATS else tags.get(self.tool_format, THINK_TAGS)

    def parser(self) -> AnswerParser:
        return AnswerParser(
            thoughts=self.thoughts,
            tool_format=self.tool_format,
            tags=self.tags,
            forced=self.forced,
            schemas=self.schemas,
        )


def whole(reading: Reading, text: str) -> Answer:
    return put_together([reading.parser().feed(text, is_last=True)])


def streamed(reading: Reading, pieces: Sequence[str]) -> Answer:
    """The answer that a client puts together of the results after each piece."""
    parser = reading.parser()
    parts = [parser.feed(piece) for piece in pieces]
    return put_together([*parts, parser.feed("", is_last=True)])


def put_together(parts: Sequence[Part]) -> Answer:
    calls: list[tuple[str, str]] = []
    for part in parts:
        for piece in part.calls:
            if piece.index == len(calls):
                assert piece.id, "the first piece of a call has its id"
                calls.append((piece.name, ""))
            assert piece.index == len(calls) - 1, "calls come one after another"
            name, arguments = calls[-1]
            calls[-1] = name, arguments + piece.arguments
    return Answer("".join(part.thought for part in parts), "".join(part.content for part in parts), tuple(calls))


def check_every_cut(reading: Reading, text: str, expected: Answer) -> None:
    """Hold the answer to `expected`: whole, by the character, and in two or three pieces cut anywhere."""
    assert whole(reading, text) == expected
    assert streamed(reading, list(text)) == expected
    for cut in range(len(text) + 1):
        assert streamed(reading, [text[:cut], text[cut:]]) == expected, (text[:cut], text[cut:])
    if len(text) <= MAX_PAIRED_CHARS:
        for begin, end in combinations(range(len(text) + 1), 2):
            pieces = [text[:begin], text[begin:end], text[end:]]
            assert streamed(reading, pieces) == expected, pieces
