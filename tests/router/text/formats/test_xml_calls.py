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
    "<parameter=a>\n</function>\nü\n</parameter>\n": '{"a": "</function>\\nü"}',
    "<parameter=a>\nb</parameter> c\n</parameter>\n": '{"a": "b</parameter> c"}',
    "<parameter=a>\n</tool_call> or <parameter=n>\n</parameter>": '{"a": "</tool_call> or <parameter=n>"}',
    "<parameter=a>\nb\n<parameter=c>\nd\n</parameter>": '{"a": "b\\n<parameter=c>\\nd"}',
    "<parameter=a>\n<function=g>\n</parameter> </function> ": '{"a": "<function=g>"}',
    "<parameter=a>\nb\n": '{"a": "b"}',
    "<parameter=>x<parameter=n>3</parameter>": '{"n": 3}',
}
OPEN: dict[str, Answer] = {
    "": Answer(calls=(("f", "{"),)),
    "<parameter=a>\nb\n": Answer(calls=(("f", '{"a": "b'),)),
    "<parameter=a>\nb\n</para": Answer(calls=(("f", '{"a": "b\\n</para'),)),
    "<parameter=a>\nb\n</parameter>\n</func": Answer(calls=(("f", '{"a": "b"'),)),
    "<parameter=a>b</parameter>\n<parameter=n>\n12": Answer(calls=(("f", '{"a": "b", "n": '),)),
}
"""Texts of a call that is cut off, and what is told of it."""
SEVERAL: dict[str, Answer] = {
    "<function=f>\n</function>\n<function=g>\n</function>\n</tool_call> b": Answer(
        content=" b", calls=(("f", "{}"), ("g", "{}"))
    ),
    "<function=f><parameter=n>1</parameter>\n<function=f><parameter=n>2</parameter></tool_call>": Answer(
        calls=(("f", '{"n": 1}'), ("f", '{"n": 2}'))
    ),
    "<function=f></function><tool_call><function=g></function></tool_call>": Answer(calls=(("f", "{}"), ("g", "{}"))),
    "<function=f>\n<tool_call><function=g></tool_call>": Answer(calls=(("f", "{}"), ("g", "{}"))),
    "<function=f><parameter=a>\nb\n</function>\n</tool_call>\n<tool_call><function=g></function></tool_call>": Answer(
        calls=(("f", '{"a": "b"}'), ("g", "{}"))
    ),
    "<function=f></function>\nSo.": Answer(content="So.", calls=(("f", "{}"),)),
    "<function=f></function>\nSo.\n<tool_call><function=g></tool_call>": Answer(
        content="So.", calls=(("f", "{}"), ("g", "{}"))
    ),
    "<function=f></function></parameter></tool_call> b": Answer(content=" b", calls=(("f", "{}"),)),
}


@pytest.mark.parametrize("text", CALLED)
def test_values_have_their_types_wherever_the_text_is_cut(text: str) -> None:
    call = Answer("", "", (("f", CALLED[text]),))
    check_every_cut(READING, f"</think><tool_call>\n<function=f>{text}</function></tool_call>", call)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "<tool_call><function=", "<tool_call>f</tool_call>", "<tool_call><function=>", "<tool_call>\n\nf"],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    check_every_cut(READING, f"So.</think>{text}", Answer("So.", text))


@pytest.mark.parametrize("text", OPEN)
def test_a_call_that_is_cut_off_is_told_as_far_as_it_is_written(text: str) -> None:
    reading = READING._replace(thoughts="")
    check_every_cut(reading, f"<tool_call>\n<function=f>{text}", OPEN[text])
    parser = reading.parser()
    parser.feed(f"<tool_call>\n<function=f>{text}", is_last=True)
    assert parser.is_calling and not parser.has_called


@pytest.mark.parametrize("text", SEVERAL)
def test_calls_follow_one_another_with_or_without_end_tags(text: str) -> None:
    check_every_cut(READING._replace(thoughts=""), f"<tool_call>{text}", SEVERAL[text])


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
