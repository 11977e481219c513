"""An answer taken apart: thoughts, text and calls, the same however it arrives."""

import asyncio
import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import RequestError
from router.answers.chat_bodies import ChatChunkWriter, chat_choice_body
from router.dispatch.completion.choice import Choice, Delivery
from router.requests.completion_api import ResponseOptions
from router.text.chat_answer import MAX_PIECE_CHARS, AnswerParser
from router.text.chat_template import ChatTemplate
from router.text.formats.parts import MAX_CALLS, Part
from router.text.formats.shapes import GEMMA_TAGS, HARMONY_TAGS, MARKS, MISTRAL_TAGS, THINK_TAGS, Thoughts
from router.text.formats.tagged import TaggedAnswer
from tests.support.completions import choice_of, make_completion

F = '{"name": "f", "arguments": {"a": "ü"}}'
F_CALL = ("f", '{"a": "ü"}')
QUOTING = r'{"name": "f", "arguments": {"a": "</tool_call>\"</tool_call>\\"}}'
QUOTING_CALL = ("f", QUOTING[27:-1])
LLAMA_F = '{"name": "f", "parameters": {"a": "ü"}}'
NO_NAME = r'{"name": "\x", "arguments": {}}'
DEEP = "[" * 100_000


XML_SCHEMAS = {
    "f": {
        "properties": {
            "a": {"type": "string"}, "n": {"type": "integer"}, "any": {"type": ["string", "null"]},
            "list": {"type": "array"}, "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        }
    }
}  # fmt: skip


TAGS = {"mistral": MISTRAL_TAGS, "gemma": GEMMA_TAGS, "harmony": HARMONY_TAGS}
"""Of thoughts, by format of calls."""


def options(tool_format: str, thoughts: Thoughts = "may come") -> ResponseOptions:
    schemas = json.dumps(XML_SCHEMAS)
    tags = TAGS.get(tool_format, THINK_TAGS)
    return ResponseOptions(
        False, False, False, False, False, thoughts=thoughts, tags=tags, tool_format=tool_format, tool_schemas=schemas
    )


def xml(*parameters: tuple[str, str], name: str = "f") -> str:
    """A call, as Qwen3.5 writes it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


FORMS = {"thoughts have begun": options("", "have begun"), "no thoughts": options("", "")}


def make_choice() -> Choice:
    choice = choice_of(make_completion())
    choice.output.finish_reason = "stop"
    return choice


def whole_choice(text: str, choice: Choice, how: ResponseOptions) -> dict[str, Any]:
    return asyncio.run(chat_choice_body(text, choice, how))


def streamed(pieces: list[str], how: ResponseOptions) -> tuple[dict[str, Any], str]:
    """The message and the finish reason that a client puts together."""
    writer = ChatChunkWriter({"id": "1"}, how, make_choice())
    events = [writer.chunk(Delivery(0, piece, index + 1)) for index, piece in enumerate(pieces[:-1])]
    events.append(writer.chunk(Delivery(0, pieces[-1], len(pieces), "stop")))
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for event in b"".join(events).decode().split("\n\n")[:-1]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                put_together(message["tool_calls"], value)
            elif name != "role":
                message[name] += value
        reason = choice["finish_reason"] or reason
    return message, reason


def put_together(calls: list[Any], deltas: list[Any]) -> None:
    """As clients do it, by index."""
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({name: delta[name] for name in ("id", "type")} | {"function": {"arguments": ""}})
        function = calls[delta["index"]]["function"]
        function |= {"name": delta["function"].get("name", function.get("name"))}
        function["arguments"] += delta["function"]["arguments"]


def told(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, what is said, and name and arguments of each call."""
    calls = message.get("tool_calls", [])
    assert all(set(call) == {"id", "type", "function"} for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message.get("reasoning_content", ""), message["content"] or "", named


@pytest.mark.parametrize(
    ("how", "text", "expected"),  # how: of FORMS, or a way to write calls
    [
        ("", "Hello\n", ("", "Hello\n", [])),
        ("", "<think>\nwhy\n\nso\n</think>\n\nHello", ("why\n\nso", "Hello", [])),
        ("", "\n<think>why", ("why", "", [])),
        ("", "<think>\n\n</think>\n\nHello", ("", "Hello", [])),
        ("", "<thin air", ("", "<thin air", [])),
        ("", "a <think>b</think>", ("", "a <think>b</think>", [])),
        ("", f"<tool_call>{F}</tool_call>", ("", f"<tool_call>{F}</tool_call>", [])),
        ("", F, ("", F, [])),
        ("thoughts have begun", "why\n</think>\n\nHello", ("why", "Hello", [])),
        ("no thoughts", "<think>why</think>", ("", "<think>why</think>", [])),
        ("hermes", f"<tool_call>\n{F}\n</tool_call>", ("", "", [F_CALL])),
        ("hermes", f"<think>x</think>\n\nI call.\n<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call>",
         ("x", "I call.", [F_CALL, F_CALL])),
        ("hermes", f"<tool_call>{F}", ("", "", [F_CALL])),
        ("hermes", "a <tool_call>{</tool_call> b", ("", "a <tool_call>{</tool_call> b", [])),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', ("", '<tool_call>{"name": 5}</tool_call>', [])),
        ("hermes", f"<tool_call>{DEEP}</tool_call>", ("", f"<tool_call>{DEEP}</tool_call>", [])),
        ("hermes", f"<tool_call>{QUOTING}</tool_call> a<tool_call>{F}</tool_call>", ("", " a", [QUOTING_CALL, F_CALL])),
        ("hermes", f'<tool_call>{{"</tool_call> b<tool_call>{F}</tool_call>',
         ("", '<tool_call>{"</tool_call> b', [F_CALL])),
        ("hermes", "1 < 2\n<tool", ("", "1 < 2\n<tool", [])),
        ("xml", xml(("a", "ü")), ("", "", [F_CALL])),
        ("xml", f"<think>x</think>\n\nI call.\n\n{xml(('a', '3'), ('n', '3'))}\n{xml()}",
         ("x", "I call.", [("f", '{"a": "3", "n": 3}'), ("f", "{}")])),
        ("xml", xml(("a", " x\n\ny <b> "), ("any", "null"), ("list", '["</tool", 1]')),
         ("", "", [("f", '{"a": " x\\n\\ny <b> ", "any": null, "list": ["</tool", 1]}')])),
        ("xml", xml(("flag", "True"), ("n", "three"), ("what", "5")),
         ("", "", [("f", '{"flag": true, "n": "three", "what": "5"}')])),
        ("xml", xml(("n", "true"), ("any", "text")), ("", "", [("f", '{"n": "true", "any": "text"}')])),
        ("xml", "<tool_call><function=f><parameter=a>\nü\n<parameter=n>\n3\n</function>",
         ("", "", [("f", '{"a": "ü", "n": 3}')])),
        ("xml", f"<tool_call>{F}</tool_call> b", ("", f"<tool_call>{F}</tool_call> b", [])),
        ("xml", "1 < 2\n<tool", ("", "1 < 2\n<tool", [])),
        ("llama", LLAMA_F, ("", "", [F_CALL])),
        ("llama", f"<|python_tag|>{LLAMA_F}; {LLAMA_F}", ("", "", [F_CALL, F_CALL])),
        ("llama", ' {"a": 1}', ("", ' {"a": 1}', [])),
        ("llama", f"{LLAMA_F} is it", ("", "is it", [F_CALL])),
        ("llama", f'{{"parameters": {{}}, "name": "f"}}; {LLAMA_F}', ("", "", [("f", "{}"), F_CALL])),
        ("llama", f'{{"type": "function", {LLAMA_F[1:]}\n{LLAMA_F}', ("", "", [F_CALL, F_CALL])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
        ("hermes", f"<tool_call>{F}\n{F}\n</tool_call>\n a", ("", " a", [F_CALL, F_CALL])),
        ("hermes", f'<tool_call>{F[:-1]}, "id": 5}}\n</tool_call>', ("", "", [F_CALL])),
        ("hermes", f"<tool_call>{F}\nWell.", ("", "Well.", [F_CALL])),
        ("hermes", f"<tool_call>{F}\n<tool_call>{F}</tool_call>", ("", "", [F_CALL, F_CALL])),
        ("hermes", f"<tool_call>{F}\nWell.\n<tool_call>{F}", ("", "Well.", [F_CALL, F_CALL])),
        ("hermes", f"<tool_call>{F}, nothing</tool_call>", ("", "", [F_CALL])),
        ("hermes", f"<tool_call>{F}{'.' * 300}</tool_call>", ("", f"{'.' * 300}</tool_call>", [F_CALL])),
        ("hermes", f"<tool_call>{F[:-1]}</tool_call> a", ("", " a", [F_CALL])),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"ü\\"}"}</tool_call>', ("", "", [F_CALL])),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a"}',
         ("", '<tool_call>{"name": "f", "arguments": "a"}', [])),
        ("hermes", f'<tool_call>{{"a": 1}}<tool_call>{F}</tool_call>', ("", '<tool_call>{"a": 1}', [F_CALL])),
        ("hermes", "<tool_call>\n\nno", ("", "<tool_call>\n\nno", [])),
        ("hermes", f"<tool_call>{F}\n</tool_", ("", "", [F_CALL])),
        ("hermes", f"<tool_call>{NO_NAME}", ("", f"<tool_call>{NO_NAME}", [])),
        ("llama", f"It is {LLAMA_F}", ("", f"It is {LLAMA_F}", [])),
        ("llama", LLAMA_F * (MAX_CALLS + 1), ("", LLAMA_F, [F_CALL] * MAX_CALLS)),
    ],
)  # fmt: skip
def test_whole_or_by_the_character(how: str, text: str, expected: Any) -> None:
    form = FORMS.get(how) or options(how)
    whole = whole_choice(text, make_choice(), form)
    reason = "tool_calls" if expected[2] else "stop"
    assert (told(whole["message"]), whole["finish_reason"]) == (expected, reason)
    if len(text) < 1000:
        message, end = streamed(list(text), form)
        assert (told(message), end) == (expected, reason)


PARTS = [
    *MARKS,
    "[TOOL_CALLS]f[ARGS]",
    '[TOOL_CALLS][{"name": "f", "arguments": ',
    "[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}",
    "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{",
    "<|call|>",
    "<|start|>assistant",
    '<|tool_call>call:f{a:<|"|>',
    "call:g{n:[1,True],",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    F,
    QUOTING,
    LLAMA_F,
    xml(("a", "3"), ("n", "3")),
    "<function=f>",
    "<parameter=n>",
    "</parameter>",
    F[:28],
    "{",
    "}",
    '"',
    "\\",
    "\n",
    " ",
    "<",
    "a",
    ";",
]


@pytest.mark.medium
@settings(max_examples=500)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    how=st.sampled_from(["", "hermes", "xml", "llama", "mistral", "harmony", "gemma"]),
    thoughts=st.sampled_from(["", "may come", "have begun"]),
)
def test_it_does_not_matter_how_it_is_cut(parts: list[str], cuts: list[int], how: str, thoughts: Thoughts) -> None:
    text = "".join(parts)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(ends)]
    form = options(how, thoughts)
    message, _ = streamed(pieces, form)
    assert told(message) == told(whole_choice(text, make_choice(), form)["message"])


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(thoughts="", tool_format="hermes")
    pieces = ["<tool_call>\n{", '"name": "f",', '"arguments": ', '{"a"', ': "b', "</tool", '_call>"', "}", "}\n</tool_"]
    told = [[call.arguments for call in parser.feed(piece).calls] for piece in pieces]
    assert told == [[], [], [], ['{"a"'], [': "b'], [], ['</tool_call>"'], ["}"], []]
    assert parser.has_called and parser.feed("call>", is_last=True) == Part()


@pytest.mark.parametrize(
    ("arguments", "content"),  # cut off, and what is said behind
    [
        ('{"a": [1, "b', ""),
        ('{"a": "b\\', ""),
        ('{"a": "b</tool_', ""),
        ('{"a": {', "</tool_call> c"),
        ('{"a": "b', "</tool_call> c"),
        ("{", ""),
    ],
)
def test_a_call_that_is_cut_off_is_a_call(arguments: str, content: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}{content}'
    done = make_choice()
    done.output.finish_reason = "length"
    whole = whole_choice(text, done, options("hermes"))
    assert whole["finish_reason"] == "length"
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": arguments}
    assert whole["message"]["content"] == (" c" if content else None)
    message, _ = streamed(list(text), options("hermes"))
    assert message["tool_calls"][0]["function"] == call["function"] and message["content"] == (content and " c")


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", f"<tool_call>{F[:-4]}"),
        ("hermes", f"<tool_call>{F}</tool_call><tool_call>{F[:-4]}"),
        ("xml", "<tool_call><function=f><parameter=a>\nb"),
        ("xml", "<tool_call><function=f><parameter=a>\nb\n</parameter>\n"),
        ("llama", LLAMA_F[:-4]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1'),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1'),
        ("gemma", '<|tool_call>call:f{a:<|"|>b'),
    ],
)
def test_a_stop_string_inside_a_call_is_no_end_with_calls(tool_format: str, text: str) -> None:
    form = options(tool_format)
    whole = whole_choice(text, make_choice(), form)
    assert whole["finish_reason"] == streamed(list(text), form)[1] == "stop"
    with pytest.raises(json.JSONDecodeError):
        json.loads(whole["message"]["tool_calls"][-1]["function"]["arguments"])


@pytest.mark.parametrize(
    ("tool_format", "text", "name"),
    [
        ("hermes", "<to", None),
        ("hermes", "<tool_call>\n", None),
        ("hermes", '\n<tool_call>\n{"name": "fi', "find"),
        ("hermes", '<tool_call>\n{"name": "find", "argu', "find"),
        ("hermes", "<think>", None),
        ("hermes", "<think>why</think>\n\n", None),
        ("llama", '{"na', None),
        ("llama", '{"name": "fe', "fetch"),
        ("mistral ids", "[TOOL_CALLS]fi", "find"),
        ("mistral ids", "[TOOL_CALLS]find[CALL_ID]abc", "find"),
        ("mistral ids", "[TOOL_CALLS]find[CALL_ID]abcdefghi[AR", "find"),
        ("mistral list", '[TOOL_CALLS][{"name": "find", "arg', "find"),
        ("harmony", "<|channel|>comm", None),
        ("harmony", "<|channel|>commentary to=functions.fe", "fetch"),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.fi",
            "find",
        ),
        ("gemma", "<|tool_call>call:fe", "fetch"),
        ("xml", "<tool_call>\n<function=fi", "find"),
    ],
)
def test_of_a_forced_call_nothing_is_said_and_its_name_is_told_once_it_is_certain(
    tool_format: str, text: str, name: str | None
) -> None:
    for forced in (("find", "fetch"), ("find",)):
        form = dataclasses.replace(options(tool_format), forced=forced)
        message, _ = streamed(list(text), form)
        expected = name or ("find" if len(forced) == 1 and not text.startswith("<think>") else None)
        called = [call["function"] for call in message["tool_calls"]]
        assert called == [{"name": expected, "arguments": ""}] * (expected in forced)
        assert message["content"] == ""
        whole = whole_choice(text, make_choice(), form)["message"]
        assert [call["function"] for call in whole.get("tool_calls", [])] == called


def test_thoughts_that_are_not_wanted_are_left_out() -> None:
    form = dataclasses.replace(options("hermes"), tells_thoughts=False)
    text = f"<think>why</think>Well.<tool_call>{F}</tool_call>"
    assert told(streamed(list(text), form)[0]) == ("", "Well.", [F_CALL])
    assert "reasoning_content" not in whole_choice(text, make_choice(), form)["message"]


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parser = AnswerParser(thoughts="may come", tool_format="hermes")
    shown = [parser.feed(piece) for piece in ("<think>", "why", " so", "</think>", "\n\nHe", "llo <", "b")]
    assert [part.thought for part in shown] == ["", "why", " so", "", "", "", ""]
    assert [part.content for part in shown] == ["", "", "", "", "He", "llo ", "<b"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_tools_reach_a_template_that_takes_them() -> None:
    source = "{% if tools %}{{ tools | tojson }} in <tool_call></tool_call>{% endif %}"
    template = ChatTemplate(source, {})
    assert template.tool_format == "hermes"
    assert template.render([], {}, 1000, TOOLS) == f"{json.dumps(TOOLS)} in <tool_call></tool_call>"
    with pytest.raises(RequestError, match="takes no tools"):
        ChatTemplate("<tool_call>", {}).render([], {}, 1000, TOOLS)


async def test_a_long_answer_does_not_hold_the_loop_and_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest text that a reader has is short, because each of its steps copies it."""
    lengths = []
    step = TaggedAnswer.step

    def noted(self: TaggedAnswer, part: Part, is_last: bool) -> bool:
        lengths.append(len(self.held.text))
        return step(self, part, is_last)

    async def turns() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    monkeypatch.setattr(TaggedAnswer, "step", noted)
    order: list[str] = []
    other = asyncio.create_task(turns())
    text = "[TOOL_CALLS]" * 10_000
    assert (await chat_choice_body(text, make_choice(), options("mistral")))["message"]["content"] == text
    other.cancel()
    assert len(order) >= len(text) // MAX_PIECE_CHARS and max(lengths) < 2 * MAX_PIECE_CHARS
    lengths.clear()
    assert AnswerParser(thoughts="", tool_format="mistral").feed(text, is_last=True).content == text
    assert max(lengths) < 2 * MAX_PIECE_CHARS
