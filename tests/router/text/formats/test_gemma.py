"""Calls of Gemma 4 become JSON, the same wherever the text is cut."""

import json

import pytest

from common.base.json_file import JsonObject
from router.text.formats.registry import FORMATS
from router.text.formats.shapes import ToolFormat
from tests.support.answer_parts import Answer, Reading, check_every_cut, whole

ARGUMENTS = {
    "{}": "{}",
    '{city:<|"|>Oslo<|"|>,days:3}': '{"city": "Oslo", "days": 3}',
    '{a:[1,True,None,<|"|>x}<|"|>],b c:{d:-1.5e3}}': '{"a": [1, true, null, "x}"], "b c": {"d": -1.5e3}}',
    '{a:<|"|>"\\\n<|"|>}': r'{"a": "\"\\\n"}',
    '{a:<|"|><tool_call|><|"|>}': '{"a": "<tool_call|>"}',
    "{ a : 1 , b : [ ] }": '{"a": 1, "b": []}',
    '{<|"|>a:b<|"|>:1}': '{"a:b": 1}',
    '{<|"|>"a"<|"|> : 1}': r'{"\"a\"": 1}',
    '{city:"Oslo, Norway",n:3}': '{"city": "Oslo, Norway", "n": 3}',
    '{"a":"\\"}\\n","b":["x" , "\n\\z"]}': r'{"a": "\"}\n", "b": ["x", "\n\\z"]}',
    "{a:hello world,b:0x10,c:1.,d:01}": '{"a": "hello world", "b": "0x10", "c": "1.", "d": "01"}',
}
MALFORMED: dict[str, Answer] = {
    "<|tool_call>call:f{": Answer(calls=(("f", "{"),)),
    "<|tool_call>call:f{a": Answer(calls=(("f", "{"),)),
    "<|tool_call>call:f{a:1": Answer(calls=(("f", '{"a": '),)),
    '<|tool_call>call:f{a:<|"|>b<|': Answer(calls=(("f", '{"a": "b<|'),)),
    '<|tool_call>call:f{a:<|"|>b<tool_call|>c': Answer("", "c", (("f", '{"a": "b"}'),)),
    "<|tool_call>call:f{a:1<tool_call|>c": Answer("", "c", (("f", '{"a": 1}'),)),
    "<|tool_call>call:f{a:1]<tool_call|>c": Answer("", "c", (("f", '{"a": 1}'),)),
    "<|tool_call>call:f{a:[1,2<tool_call|>": Answer(calls=(("f", '{"a": [1, 2]}'),)),
    "<|tool_call>call:f{a:,b:2}<tool_call|>": Answer(calls=(("f", '{"a": "", "b": 2}'),)),
    '<|tool_call>call:f{<|"|>a<|"|>}<tool_call|>': Answer(calls=(("f", "{}"),)),
    '<|tool_call>call:f{<|"|>a<|"|><tool_call|>': Answer(calls=(("f", "{}"),)),
    '<|tool_call>call:f{<|"|>a<|"|> ': Answer(calls=(("f", "{"),)),
    "<|tool_call>call:f<tool_call|> b": Answer("", " b", (("f", "{}"),)),
    '<|tool_call>call:f{a:"b}<tool_call|>': Answer(calls=(("f", '{"a": "\\"b"}'),)),
    '<|tool_call>call:f{a:"b\\': Answer(calls=(("f", '{"a": '),)),
    "<|tool_call>call:f{,}<tool_call|>": Answer(calls=(("f", "{}"),)),
    "<|tool_call>call:f{a:1}} b": Answer("", "} b", (("f", '{"a": 1}'),)),
    "<|tool_call>call:f{a:1}": Answer(calls=(("f", '{"a": 1}'),)),
}
TEXTS = [
    "<|tool_call>",
    "<|tool_call>call:f",
    "<|tool_call>f{a:1}<tool_call|>",
    "<|tool_call>call:{}<tool_call|>",
    "a<|tool_",
]
"""Texts without a call."""


@pytest.mark.parametrize("text", ARGUMENTS)
def test_arguments_are_json_wherever_the_text_is_cut(text: str) -> None:
    called = Answer(calls=(("f", ARGUMENTS[text]),))
    check_every_cut(Reading(ToolFormat.GEMMA), f"<|tool_call>call:f{text}<tool_call|>", called)
    json.loads(ARGUMENTS[text])


def test_thoughts_text_and_calls_in_a_row() -> None:
    text = "<|channel>thought\nSo.\n<channel|>Hi.\n<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>b"
    check_every_cut(Reading(ToolFormat.GEMMA), text, Answer("So.", "Hi.b", (("f", "{}"), ("g", "{}"))))
    check_every_cut(Reading(ToolFormat.GEMMA), "<|channel>thought\n<channel|>Hi", Answer("", "Hi"))
    check_every_cut(Reading(ToolFormat.GEMMA, "have begun"), "So.\n<channel|>Hi", Answer("So.", "Hi"))


@pytest.mark.parametrize("text", MALFORMED)
def test_a_call_that_is_cut_off_or_wrong_is_a_call_as_far_as_it_goes(text: str) -> None:
    check_every_cut(Reading(ToolFormat.GEMMA), text, MALFORMED[text])


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_stays_text(text: str) -> None:
    check_every_cut(Reading(ToolFormat.GEMMA), text, Answer(content=text))


def test_arguments_come_as_they_are_written() -> None:
    parser = Reading(ToolFormat.GEMMA).parser()
    pieces = ['<|tool_call>call:f{a:<|"|>b', "c", '<|"|>,n', ":1", "2,", "m:[", "1,"]
    told = [[call.arguments for call in parser.feed(piece).calls] for piece in pieces]
    assert told == [['{"a": "b'], ["c"], ['"'], [', "n": '], ["12"], [', "m": ['], ["1"]]


def test_deep_nesting_does_no_harm() -> None:
    answer = whole(Reading(ToolFormat.GEMMA), "<|tool_call>call:f{a:" + "[" * 100_000)
    assert answer.calls[0][1] == '{"a": ' + "[" * 100_000


def test_results_are_told_in_the_message_with_the_calls() -> None:
    calls = [{"id": name, "function": {"name": name * 2, "arguments": {}}} for name in "fg"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "gfh"]
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    said: list[JsonObject] = [user, calling, *results, answer, results[0], user]
    responses = [
        {"name": "gg", "response": "of g"}, {"name": "ff", "response": "of f"}, {"name": "unknown", "response": "of h"}
    ]  # fmt: skip
    expected = [user, calling | {"tool_responses": responses}, answer, results[0], user]
    history = FORMATS[ToolFormat.GEMMA].history
    assert history(said, "{% for each in message['tool_responses'] %}") == expected
    assert history(said, "{{ message.role }}") == said, "a template that knows messages of tools alone gets these"
