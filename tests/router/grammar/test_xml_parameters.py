"""Texts of Qwen3.5's calls under a grammar: any text can be written, of every allowed length, and is read back."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.grammar.grammars import Grammars
from router.grammar.grammar_main import compiled, dialect_of
from router.grammar.source import NO_GRAMMAR
from router.requests.tool_choice import TOOL_CHOICE, form_of
from router.text.formats.shapes import ToolFormat
from tests.support.answer_parts import Reading, whole

TEXTS = ["", "a", "abc", "<div>a</div>", "</", "\n", "a\n\nb\n", "</parameter", "a <parameter=b>", "</function>\nü<"]
ENDS = "</parameter>", "a</parameter>b"
"""Texts with an end tag, which no value may hold."""


def is_allowed(grammars: Grammars, tokenizer: Tokenizer, parameters: Any, value: str, *, lines: str = "\n") -> bool:
    """Tell whether a whole call with this value is a text of the grammar; hold the value to what a client gets."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    choice = TOOL_CHOICE.checked("tool_choice", "required")
    values = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    grammar, problem, _ = compiled(form_of(values, ToolFormat.XML, NO_GRAMMAR), grammars, dialect_of(grammars))
    assert not problem
    text = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{value}{lines}</parameter>\n"
        "<parameter=b>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    matcher = grammars.compile(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
        return False
    ((_, arguments),) = whole(Reading(ToolFormat.XML, "", {"f": parameters}), text).calls
    assert json.loads(arguments)["a"] == value
    return True


def parameters_of(**keywords: Any) -> dict[str, Any]:
    properties = {"a": {"type": "string", **keywords}, "b": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["a"]}


@pytest.mark.parametrize("parameters", [parameters_of(), {"type": "object"}], ids=["named", "free"])
def test_any_text_without_an_end_tag_can_be_written(
    grammars: Grammars, demo_tokenizer: Tokenizer, parameters: Any
) -> None:
    assert all(is_allowed(grammars, demo_tokenizer, parameters, text) for text in TEXTS)
    assert not any(is_allowed(grammars, demo_tokenizer, parameters, text) for text in ENDS)
    assert is_allowed(grammars, demo_tokenizer, parameters, "", lines=""), "models may write a single line break"


def test_a_text_has_every_allowed_length(grammars: Grammars, demo_tokenizer: Tokenizer) -> None:
    for least, most in ((2, 4), (0, 2), (3, None)):
        limits = {"minLength": least} | ({} if most is None else {"maxLength": most})
        allowed = [is_allowed(grammars, demo_tokenizer, parameters_of(**limits), "<ü\n</"[:size]) for size in range(6)]
        assert allowed == [least <= size <= (5 if most is None else most) for size in range(6)]
