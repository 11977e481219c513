"""Answers of gpt-oss: channels and recipients, the same wherever the text is cut."""

import json
from typing import Any

import pytest

from router.text.formats.harmony import with_descriptions, with_thinking
from router.text.formats.registry import thoughts_behind
from router.text.formats.shapes import HARMONY_TAGS, ToolFormat
from tests.support.answer_parts import Answer, Reading, check_every_cut, streamed, whole

FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
ANSWERS: dict[str, Answer] = {
    f"{FINAL}Hi.<|return|>": Answer(content="Hi."),
    f'<|channel|>analysis<|message|>So.{NEXT}{CALL}{{"a":1}}<|call|>': Answer("So.", "", (("f", '{"a":1}'),)),
    f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Hi.": Answer(content="I look.\nHi."),
    '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": "<|call|>"}<|call|>': Answer(
        calls=(("f", '{"a": "<|call|>"}'),)
    ),
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}": Answer(calls=(("f", "{}"),)),
    " to=functions.f<|channel|>commentary <|message|>{}<|call|>": Answer(calls=(("f", "{}"),)),
    "<|channel|>analysis to=functions.f code<|message|>{}<|call|>": Answer(calls=(("f", "{}"),)),
    f"{CALL}{{}}{NEXT}{FINAL}Done.": Answer(content="Done.", calls=(("f", "{}"),)),
    f"<|channel|>analysis<|message|>a{NEXT}<|channel|>analysis<|message|>b": Answer("a\nb"),
    "Hello <b>": Answer(content="Hello <b>"),
}
MALFORMED: dict[str, Answer] = {
    "<|channel|>analysis": Answer(),
    "<|channel|>": Answer(),
    "<|call|>": Answer(),
    "<|message|>Hi": Answer(content="Hi"),
    "<|channel|>unknown<|message|>Hi<|end|>": Answer(content="Hi"),
    f"<|start|>assistant<|start|>assistant{FINAL}a": Answer(content="a"),
    f"{FINAL}a{FINAL}b": Answer(content="a\nb"),
    "<|channel|>commentary to=functions. <|message|>{}<|call|>": Answer(content="{}"),
    "<|channel|>analysis to=python code<|message|>1+1<|call|>": Answer("1+1"),
    f'{CALL}{{"a": "b<|call|>': Answer(calls=(("f", '{"a": "b'),)),
    f"{CALL}nope<|call|>": Answer(calls=(("f", "nope"),)),
    f"{CALL}{{}}nope<|call|>": Answer(calls=(("f", "{}"),)),
    f"{CALL}": Answer(calls=(("f", ""),)),
    f"{CALL}<|call|>": Answer(calls=(("f", "{}"),)),
    f"{CALL}{{}}{NEXT}{CALL}<|call|>": Answer(calls=(("f", "{}"), ("f", "{}"))),
}


@pytest.mark.parametrize("text", [*ANSWERS, *MALFORMED])
def test_messages_are_told_apart_wherever_the_text_is_cut(text: str) -> None:
    check_every_cut(Reading(ToolFormat.HARMONY), text, (ANSWERS | MALFORMED)[text])


def test_a_prompt_may_end_inside_a_message() -> None:
    check_every_cut(Reading(ToolFormat.HARMONY, "have begun"), f"a{NEXT}{FINAL}b", Answer("a", "b"))
    check_every_cut(
        Reading(ToolFormat.HARMONY, ""), f"a<|end|><|start|>assistant{CALL}{{}}", Answer("", "a", (("f", "{}"),))
    )


@pytest.mark.parametrize("text", [f"<|channel|>{'x' * 1200}", "<|start|>" * 300, "<|channel|>" * 300])
def test_a_header_without_an_end_is_text_and_is_not_withheld_for_long(text: str) -> None:
    reading = Reading(ToolFormat.HARMONY)
    shown = reading.parser().feed(text).content
    assert len(shown) > 1000 and text.startswith(shown[:1000])
    assert streamed(reading, list(text)) == whole(reading, text)


@pytest.mark.parametrize(
    ("prompt", "thoughts"),
    [
        ("<|start|>assistant", "may come"),
        ("<|start|>user<|message|>a<|end|><|start|>assistant", "may come"),
        ("<|start|>assistant<|channel|>analysis<|message|>So", "have begun"),
        ("<|start|>assistant<|channel|>final<|message|>So", ""),
    ],
)
def test_what_a_prompt_says_of_thoughts(prompt: str, thoughts: str) -> None:
    assert thoughts_behind(prompt, HARMONY_TAGS) == thoughts


def test_arguments_come_as_they_are_written() -> None:
    parser = Reading(ToolFormat.HARMONY).parser()
    parser.feed(f"{CALL}{{")
    assert [parser.feed(piece).calls[0].arguments for piece in ('"a', '": [', "1]")] == ['"a', '": [', "1]"]


def test_history_has_a_single_call_in_each_message_with_its_result_behind() -> None:
    first, second = ({"id": name, "function": {"name": name, "arguments": "{}"}} for name in "fg")
    result = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "gf"]
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": [first, second]},
        *result,
        {"role": "assistant", "content": "d", "reasoning_content": None},
    ]
    assert with_thinking(said) == [
        said[0],
        {"role": "assistant", "content": "", "reasoning_content": "c", "thinking": "c\n\nb", "tool_calls": [first]},
        result[1],
        {"role": "assistant", "content": "", "reasoning_content": "c", "tool_calls": [second]},
        result[0],
        {"role": "assistant", "content": "d", "reasoning_content": None},
    ]


def test_results_without_a_call_stay_for_the_template_to_refuse() -> None:
    user = {"role": "user", "content": "a"}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "fg"]
    assert with_thinking([user, *results, user]) == [user, *results, user]


def test_tools_have_what_the_template_joins_to_texts() -> None:
    properties = {
        "a": {"enum": [1, 2], "default": 2}, "b": {"oneOf": [{"const": None}], "default": None},
        "c": {"enum": ["d"], "default": "d"}, "e": {"type": "integer", "default": 5}, "f": True,
    }  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}},
        {"type": "function", "function": {"name": "g", "description": None, "parameters": None}},
        {"type": "function", "function": {"name": "h", "description": "Say."}},
    ]
    before = json.dumps(tools)
    first, *others = (each["function"] for each in with_descriptions(tools))
    assert json.dumps(tools) == before
    assert first["description"] == "" and first["parameters"]["type"] == "object"
    found = first["parameters"]["properties"]
    assert {key: each["default"] for key, each in found.items() if key != "f"} == {
        "a": "2",
        "b": "null",
        "c": "d",
        "e": 5,
    }
    assert others == [{"name": "g", "description": "", "parameters": None}, {"name": "h", "description": "Say."}]
