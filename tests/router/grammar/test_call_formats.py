"""Grammars of calls in the formats of Mistral, gpt-oss and Gemma 4: their texts are read back as valid calls."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.grammar.grammars import Grammars
from router.grammar.grammar_main import compiled, dialect_of
from router.grammar.source import NO_GRAMMAR, GrammarSource
from router.requests.tool_choice import TOOL_CHOICE, form_of
from router.text.formats.shapes import MISTRAL_FORMATS, Thoughts, ToolFormat
from tests.router.grammar.test_checks import NOTHING, SCHEMAS, allowed, chat, named, random_text
from tests.support.answer_parts import Answer, Reading, whole
from tests.support.guided import is_valid, random_root

FORMATS = [*MISTRAL_FORMATS, ToolFormat.HARMONY, ToolFormat.GEMMA]
BEGINS = {
    ToolFormat.MISTRAL_LIST: '[TOOL_CALLS][{"name": "gr', ToolFormat.MISTRAL_IDS: "[TOOL_CALLS]gr",
    ToolFormat.MISTRAL: "[TOOL_CALLS]gr", ToolFormat.GEMMA: "<|tool_call>call:gr",
    ToolFormat.HARMONY: "<|channel|>commentary to=functions.gr",
}  # fmt: skip
"""Beginnings of a call."""
THOUGHTS = {
    ToolFormat.GEMMA: ("<|channel>thought", "\nHm.\n<channel|>"),
    ToolFormat.HARMONY: ("<|channel|>analysis<|message|>", "Hm.<|end|><|start|>assistant"),
    **dict.fromkeys(MISTRAL_FORMATS, ("[THINK]", "Hm.[/THINK]")),
}
Model = tuple[Grammars, Tokenizer]


@pytest.fixture(scope="module")
def model(grammars: Grammars, demo_tokenizer: Tokenizer) -> Model:
    return grammars, demo_tokenizer


def answers(source: GrammarSource, reading: Reading, model: Model, begin: str = "", num: int = 8) -> list[Answer]:
    """Random answers of the grammar, as a client gets them."""
    grammar, problem, _ = compiled(source, model[0], dialect_of(model[0]))
    assert not problem
    return [whole(reading, random_text(grammar, *model, seed, begin)) for seed in range(num)]


def check_calls(answer: Answer) -> set[str]:
    """Hold all arguments to the schemas; returns the names."""
    for name, arguments in answer.calls:
        assert is_valid(arguments, SCHEMAS[name])
    return {name for name, _ in answer.calls}


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("choice", ["required", *named("grüße"), allowed("required", "grüße")])
def test_forced_calls_are_calls_with_valid_arguments(model: Model, tool_format: ToolFormat, choice: Any) -> None:
    for several in (True, False):
        source = form_of(chat(choice, several=several), tool_format, NO_GRAMMAR)
        given = answers(source, Reading(tool_format, ""), model)
        assert all(answer.calls and not answer.content for answer in given)
        assert set().union(*map(check_calls, given)) <= (set(SCHEMAS) if choice == "required" else {"grüße"})
        has_several = several and tool_format is not ToolFormat.HARMONY and choice not in named("grüße")
        assert (max(len(answer.calls) for answer in given) > 1) == has_several


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_of_strict_tools_have_valid_arguments_and_text_may_stand_there_too(
    model: Model, tool_format: ToolFormat
) -> None:
    source = form_of(chat("auto", strict=True), tool_format, NO_GRAMMAR)
    is_harmony = tool_format is ToolFormat.HARMONY
    said = answers(
        source, Reading(tool_format, "may come"), model, f"{'<|channel|>final<|message|>' * is_harmony}I say {{"
    )
    assert all(answer.content.startswith("I say {") and check_calls(answer) <= SCHEMAS.keys() for answer in said)
    led = "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant" if is_harmony else "Well."
    called = answers(source, Reading(tool_format), model, led + BEGINS[tool_format])
    assert all(answer.content.startswith("Well.") and "grüße" in check_calls(answer) for answer in called)


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("thoughts", ["may come", "have begun"])
def test_forced_calls_stand_behind_thoughts(model: Model, tool_format: ToolFormat, thoughts: Thoughts) -> None:
    reading, (opening, thought) = Reading(tool_format, thoughts, forced=tuple(SCHEMAS)), THOUGHTS[tool_format]
    source = replace(
        form_of(chat("required", several=False), tool_format, NO_GRAMMAR), thoughts=thoughts, tags=reading.tags
    )
    begin = thought if thoughts == "have begun" else opening + thought
    for answer in answers(source, reading, model, begin):
        assert (answer.thought, answer.content, len(answer.calls)) == ("Hm.", "", 1)
        check_calls(answer)
    if thoughts == "may come":
        assert all(check_calls(answer) for answer in answers(source, reading, model, BEGINS[tool_format]))


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", [ToolFormat.MISTRAL, ToolFormat.HARMONY, ToolFormat.GEMMA])
def test_a_form_beside_tools_is_that_of_texts_that_call_none(model: Model, tool_format: ToolFormat) -> None:
    asked = GrammarSource("json", json.dumps(NOTHING), "guided_json", "")
    source = form_of(chat("auto", strict=True), tool_format, asked)
    text = "<|channel|>final" if tool_format is ToolFormat.HARMONY else "{"
    said = answers(source, Reading(tool_format), model, text)
    assert all(is_valid(answer.content, NOTHING) for answer in said)
    called = answers(source, Reading(tool_format), model, BEGINS[tool_format])
    assert all(check_calls(answer) and not answer.content for answer in called)


@pytest.mark.medium
@pytest.mark.parametrize("tool_format", [ToolFormat.MISTRAL, ToolFormat.HARMONY, ToolFormat.GEMMA])
def test_thoughts_have_so_many_tokens_at_most(model: Model, tool_format: ToolFormat) -> None:
    reading = Reading(tool_format, "have begun")
    source = replace(
        form_of(chat("required"), tool_format, NO_GRAMMAR),
        thoughts="have begun",
        tags=reading.tags,
        max_thought_tokens=3,
    )
    grammar, problem, _ = compiled(source, model[0], dialect_of(model[0]))
    if reading.tags.end not in model[0].special_tokens:
        assert f"{reading.tags.end} is no token of this model" in problem
        return
    assert not problem
    for seed in range(4):
        text = random_text(grammar, *model, seed)
        thought, end, _ = text.partition(reading.tags.end)
        assert end and len(model[1].encode(thought, add_special_tokens=False).ids) <= 6
        assert whole(reading, text).calls


def tools_of(schema: Any, *, strict: bool = False) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema, "strict": strict}
    choice = TOOL_CHOICE.checked("tool_choice", "required")
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "parallel_tool_calls": False}


@pytest.mark.medium
def test_gemmas_arguments_are_valid_by_random_schemas(model: Model) -> None:
    num_valid = 0
    for seed in range(24):
        schema = random_root(random.Random(seed))
        source = form_of(tools_of(schema), ToolFormat.GEMMA, NO_GRAMMAR)
        grammar, problem, dropped = compiled(source, model[0], dialect_of(model[0]))
        assert not problem, (seed, problem)
        if any("pattern" in each or "format" in each for each in dropped):
            continue
        assert not dropped
        for number in range(3):
            ((_, arguments),) = whole(Reading(ToolFormat.GEMMA, ""), random_text(grammar, *model, number)).calls
            assert is_valid(arguments, schema), (seed, arguments)
            num_valid += 1
    assert num_valid > 20


def test_a_text_that_gemma_cannot_be_held_to_is_told_or_refused(model: Model) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^b+$"}}}
    results = [
        compiled(form_of(tools_of(schema, strict=strict), ToolFormat.GEMMA, NO_GRAMMAR), model[0], dialect_of(model[0]))
        for strict in (False, True)
    ]
    assert results[0].dropped == ("f: a.pattern",) and not results[0].problem
    assert "a.pattern" in results[1].problem
