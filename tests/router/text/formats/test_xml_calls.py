"""Calls with parameters between tags: values get their types, and come as they are written."""

import pytest

from router.text.formats.shapes import ToolFormat
from router.text.formats.typed_values import ToolSchemas
from tests.support.answer_parts import Answer, Reading, check_every_cut

SCHEMAS: ToolSchemas = {
    "f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}}
}
READING = Reading(ToolFormat.XML, "have begun", SCHEMAS)
CALLED = {
    "<parameter=a>\nü\n</parameter>\n": '{"a": "ü"}',
    "<parameter=n>\n3\n</parameter><parameter=a>3</parameter>": '{"n": 3, "a": "3"}',
    '<parameter=a>\n\n\\"\n\n</parameter>': '{"a": "\\n\\\\\\"\\n"}',
    "<parameter=a></p<parameter></parameter>": '{"a": "</p<parameter>"}',
    "<parameter=l>\n[1]\n<parameter=n>\n3": '{"l": [1], "n": 3}',
    "<parameter=l>[1": '{"l": "[1"}',
    "<parameter=a>\n</parameter>": '{"a": ""}',
    "": "{}",
}


@pytest.mark.parametrize("text", CALLED)
def test_values_have_their_types_wherever_the_text_is_cut(text: str) -> None:
    call = Answer("", "", (("f", CALLED[text]),))
    check_every_cut(READING, f"</think><tool_call>\n<function=f>{text}</function></tool_call>", call)


@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call><function=", "<tool_call>f</tool_call>", "<tool_call><function=>"]
)
def test_what_is_no_call_stays_text(text: str) -> None:
    check_every_cut(READING, f"So.</think>{text}", Answer("So.", text))


def test_texts_come_as_they_are_written_and_other_values_complete() -> None:
    parser = READING.parser()
    pieces = [
        "</think><tool_call><function=f>",
        "<parameter=a>\nb",
        "c\n",
        "d",
        "\n</para",
        "meter><parameter=n>1",
        "2</",
    ]
    told = ["".join(call.arguments for call in parser.feed(piece).calls) for piece in pieces]
    assert told == ["{", '"a": "b', "c", "\\nd", "", '", "n": ', ""]
    assert parser.feed("parameter></function></tool_call>", is_last=True).calls[0].arguments == "12}"
