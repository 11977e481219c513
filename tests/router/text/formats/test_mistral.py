"""Calls of Mistral's models in three spellings, the same wherever the text is cut."""

import json
from typing import Any

import pytest

from router.text.formats.mistral import with_short_ids
from router.text.formats.parts import is_short_id
from router.text.formats.shapes import MISTRAL_FORMATS, ToolFormat
from tests.support.answer_parts import Answer, Reading, check_every_cut, whole

OSLO = ("get_weather", '{"city": "Oslo"}')
CALLED: dict[str, Answer] = {
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}': Answer(calls=(OSLO,)),
    '[TOOL_CALLS]get_weather{"city": "Oslo"}': Answer(calls=(OSLO,)),
    '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}': Answer(calls=(OSLO,)),
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]': Answer(calls=(OSLO,)),
    '[TOOL_CALLS] [{"arguments": {}, "name": "f"}]': Answer(calls=(("f", "{}"),)),
    '[TOOL_CALLS][{"name": "f", "arguments": null}, {"name": "g", "arguments": "{\\"a\\": 1}"}]': Answer(
        calls=(("f", "{}"), ("g", '{"a": 1}'))
    ),
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "}]"}}, {"name": "g", "arguments": {}}] Done.': Answer(
        content=" Done.", calls=(("f", '{"a": "}]"}'), ("g", "{}"))
    ),
    "[THINK]They ask.[/THINK]One moment.[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}": Answer(
        "They ask.", "One moment.", (("f", "{}"), ("g", "{}"))
    ),
    '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}': Answer(calls=(("f", '{"a": "[TOOL_CALLS]"}'),)),
    "[THINK]a\n[/THINK]\nb": Answer("a", "b"),
}
MALFORMED: dict[str, Answer] = {
    '[TOOL_CALLS]f[ARGS]{"a": "b[TOOL_CALLS]g{}': Answer(calls=(("f", '{"a": "b'), ("g", "{}"))),
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1': Answer(calls=(("f", '{"a": 1'),)),
    "[TOOL_CALLS]f[CALL_ID]\n{}": Answer(calls=(("f", "{}"),)),
    "[TOOL_CALLS]f[ARGS]{}} b": Answer(content="} b", calls=(("f", "{}"),)),
    '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]': Answer(content="5]", calls=(("f", "{}"),)),
    "[TOOL_CALLS][TOOL_CALLS]f{}": Answer(content="[TOOL_CALLS]", calls=(("f", "{}"),)),
    "[TOOL_CALLS]f[ARGS][TOOL_CALLS]g[ARGS] [TOOL_CALLS]h[ARGS]{}": Answer(
        calls=(("f", "{}"), ("g", "{}"), ("h", "{}"))
    ),
    "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS] ": Answer(calls=(("f", ""),)),
    "[THINK]a": Answer("a"),
}
TEXTS = [
    "[TOOL_CALLS]", "a [TOOL_CALLS] b", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS", "[TOOL_CALLS]f[ARGS]nope",
    "[TOOL_CALLS]f[CALL_ID]abc", "[TOOL_CALLS][ARGS]{}", '[TOOL_CALLS]{"a": 1}', "[TOOL_CALLS][", "[TOOL_CALLS][1, 2]",
    "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": 5}]', '[TOOL_CALLS][{"name": "f", "arguments": "nope"}] x', "a [TOOL",
    "[TOOL_CALLS]\n\na", '[TOOL_CALLS] [ {"name": "f", "arguments": 5}]', "[/THINK]a",
    "[TOOL_CALLS] f\ng", f"[TOOL_CALLS]{'f' * 99}",
]  # fmt: skip
"""Texts without a call."""


@pytest.mark.parametrize("text", [*CALLED, *MALFORMED])
def test_calls_are_found_wherever_the_text_is_cut(text: str) -> None:
    check_every_cut(Reading(ToolFormat.MISTRAL), text, (CALLED | MALFORMED)[text])


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_stays_text(text: str) -> None:
    check_every_cut(Reading(ToolFormat.MISTRAL), text, Answer(content=text))


def test_each_version_reads_the_calls_of_the_others() -> None:
    for tool_format in MISTRAL_FORMATS:
        for text, expected in CALLED.items():
            assert whole(Reading(tool_format), text) == expected


def test_a_long_name_is_text_and_is_not_withheld_for_long() -> None:
    parser = Reading(ToolFormat.MISTRAL).parser()
    shown = parser.feed(f"[TOOL_CALLS]{'f' * 600}").content
    assert len(shown) > 500


@pytest.mark.parametrize("text", ['f[ARGS]{"a": "', '[{"name": "f", "arguments": {"a": "'])
def test_arguments_come_as_they_are_written(text: str) -> None:
    parser = Reading(ToolFormat.MISTRAL).parser()
    parser.feed(f"[TOOL_CALLS]{text}")
    assert [parser.feed(piece).calls[0].arguments for piece in ("b", "c", '"}')] == ["b", "c", '"}']


def test_a_call_keeps_the_models_id_if_templates_take_it() -> None:
    for told, is_kept in (("abcdefghi", True), ("call_123", False), ("", False)):
        (call,) = Reading(ToolFormat.MISTRAL).parser().feed(f"[TOOL_CALLS]f[CALL_ID]{told}[ARGS]{{}}").calls
        assert is_short_id(call.id) and (call.id == told) is is_kept


def test_history_has_ids_that_templates_take_and_results_keep_their_calls() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"type": "function", "function": {"name": "g", "arguments": "{}"}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "abcdefghi"}, other]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "b"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "c"},
    ]
    before = json.dumps(said)
    user, answer, *results = with_short_ids(said)
    ids = [each["id"] for each in answer["tool_calls"]]
    assert user == said[0] and json.dumps(said) == before
    assert [each["tool_call_id"] for each in results] == ids[:2] and ids[1] == "abcdefghi"
    assert all(map(is_short_id, ids)) and len(set(ids)) == 3
