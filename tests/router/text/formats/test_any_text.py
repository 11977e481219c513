"""Texts made of the pieces of each format: read alike however they are cut, and in the end always read."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.formats.parts import MAX_WITHHELD_CHARS, joined
from router.text.formats.shapes import Thoughts, ToolFormat
from tests.support.answer_parts import Answer, Reading, put_together, streamed, whole

CALL = '{"name": "f", "arguments": {"a": [1]}, "id": "abcdefghi"}'
SIGNS = [*'[]{}",:\\ \n<x1', "true"]
PIECES = {
    ToolFormat.MISTRAL: [
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "f", "abcdefghi",
        '"name": "f", ', '"arguments": ', CALL,
    ],
    ToolFormat.HARMONY: [
        "<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.f ", "<|constrain|>",
        "json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", '{"a": "b"}',
    ],
    ToolFormat.GEMMA: [
        "<|channel>thought", "<channel|>", "<|tool_call>", "call:f{", "a:", '<|"|>', "<tool_call|>",
        "<|tool_call>call:f{a:", "<|tool_call>call:f<tool_call|>", '{a:"',
    ],
    ToolFormat.XML: [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>",
        "<parameter=n>", "</parameter>", "\n<parameter=n>\n", "</function></tool_call>",
    ],
    ToolFormat.HERMES: ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL[:28], f"<tool_call>{CALL}"],
    ToolFormat.LLAMA: ["<|python_tag|>", '{"name": "f", "parameters": {', CALL, ";"],
}  # fmt: skip
SCHEMAS = {"f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}


@st.composite
def texts(draw: st.DrawFn) -> tuple[ToolFormat, str]:
    tool_format = draw(st.sampled_from([*PIECES]))
    pieces = PIECES[tool_format]
    return tool_format, "".join(draw(st.lists(st.sampled_from([*pieces, *pieces, *SIGNS]), max_size=16)))


@pytest.mark.medium
@settings(max_examples=600)
@given(
    made=texts(),
    cuts=st.lists(st.integers(0, 150), max_size=4),
    thoughts=st.sampled_from(["", "may come", "have begun"]),
)
def test_answers_do_not_depend_on_cuts(made: tuple[ToolFormat, str], cuts: list[int], thoughts: Thoughts) -> None:
    tool_format, text = made
    reading = Reading(tool_format, thoughts, SCHEMAS)
    expected = whole(reading, text)
    assert streamed(reading, list(text)) == expected
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert streamed(reading, [text[begin:end] for begin, end in pairwise(ends)]) == expected
    parts = reading.parser().parts(text, is_last=True)
    assert all(bool(part.thought) + bool(part.content) + bool(part.calls) == 1 for part in parts)
    assert put_together(parts) == expected


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", PIECES)
def test_what_never_ends_is_read_all_the_same(tool_format: ToolFormat) -> None:
    reading, pieces = Reading(tool_format, "may come", SCHEMAS), [*PIECES[tool_format], *SIGNS]
    begins = ["", *PIECES[tool_format], *map("".join, pairwise(PIECES[tool_format]))]
    for begin, endless in product(begins, pieces):
        text = begin + endless * (3000 // len(endless))
        answer = streamed(reading, [text[i : i + 100] for i in range(0, len(text), 100)])
        assert answer == whole(reading, text)
        assert answer == Answer() or len("".join([*answer[:2], *map(str, answer.calls)])) < 9 * len(text)


@pytest.mark.parametrize("tool_format", PIECES)
@pytest.mark.parametrize("blank", ["\n", " ", " \n"])
def test_endless_white_space_is_not_withheld_as_a_text(tool_format: ToolFormat, blank: str) -> None:
    call = {
        ToolFormat.HERMES: f"<tool_call>{CALL}", ToolFormat.XML: "<tool_call><function=f></function>",
        ToolFormat.GEMMA: "<|tool_call>call:f{}", ToolFormat.LLAMA: CALL, ToolFormat.MISTRAL: f"[TOOL_CALLS][{CALL}",
    }.get(tool_format, "")  # fmt: skip
    all_thoughts: list[Thoughts] = ["", "may come", "have begun"]
    for thoughts, begin in product(all_thoughts, ("", "a", call)):
        parser = Reading(tool_format, thoughts, SCHEMAS).parser()
        parser.feed(begin)
        for _ in range(1000):
            parser.feed(blank)
            assert len(parser._reader.held.text) <= 300


OPENINGS = {
    ToolFormat.HERMES: ('<tool_call>{"name": "f", "arguments": {"a": "', "</tool_call>"),
    ToolFormat.MISTRAL: ('[TOOL_CALLS]f[ARGS]{"a": "', "[TOOL_CALLS]"),
    ToolFormat.HARMONY: ('<|channel|>commentary to=functions.f<|message|>{"a": "', "<|call|>"),
    ToolFormat.GEMMA: ('<|tool_call>call:f{a:<|"|>', "<tool_call|>"),
}
"""A call up to its text, and the tag that ends a call whose text has no end."""


@pytest.mark.parametrize("tool_format", OPENINGS)
def test_a_tag_is_text_if_the_text_around_it_is_long(tool_format: ToolFormat) -> None:
    opening, tag = OPENINGS[tool_format]
    reading, piece = Reading(tool_format, "may come"), "b" * 100
    parser = reading.parser()
    parser.feed(opening)
    told = [len(joined([parser.feed(each)]).calls) for each in [tag, *[piece] * (MAX_WITHHELD_CHARS // 100 + 1)]]
    assert told[:-2] == [0] * (len(told) - 2) and told[-1] == 1
    for num, is_text in ((MAX_WITHHELD_CHARS // 100 - 1, False), (MAX_WITHHELD_CHARS // 100 + 1, True)):
        answer = whole(reading, opening + tag + piece * num)
        assert answer == streamed(reading, [opening, tag, *[piece] * num])
        (call,) = answer.calls
        assert (call[1].count("b") == 100 * num) is is_text and (tag in call[1]) is is_text
