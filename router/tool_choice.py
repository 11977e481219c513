"""The field `tool_choice`: whether an answer may call tools, has to, or has to call one that is named."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import RequestError
from router.chat_answer import CALL, CALL_END, ToolFormat
from router.grammar_source import Calls, GrammarSource, calls_source, nesting
from router.json_rules import is_text, shown, wrong
from router.structured_fields import MAX_NESTING, MAX_SOURCE_CHARS

CHOICES = ("auto", "none", "required")
FORMATS = {
    ToolFormat.HERMES: (CALL, '\n{"name": ', ', "arguments": ', "}\n", CALL_END, "\n"),
    ToolFormat.LLAMA: ("", '{"name": ', ', "parameters": ', "}", "", ""),
}
"""What begins a call, stands before its name, between that and arguments, behind those, ends it, and between calls."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A rule: one of a few words, or a function; gives the word, or a tuple of the name."""

    wants = '"auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'

    @property
    def schema(self) -> dict[str, Any]:
        function = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        properties = {"type": {"const": "function"}, "function": function}
        named = {"type": "object", "properties": properties, "required": ["type", "function"]}
        return {"anyOf": [{"enum": list(CHOICES)}, named]}

    def checked(self, name: str, value: Any) -> str | tuple[str]:
        if isinstance(value, str) and value in CHOICES:
            return value
        is_function = isinstance(value, dict) and value.get("type") == "function"
        function = value.get("function") if is_function else None
        if not isinstance(function, dict) or not is_text(function.get("name")):
            raise wrong(name, value, self.wants)
        return (function["name"],)


def form_of(values: dict[str, Any], tool_format: ToolFormat, asked: GrammarSource) -> GrammarSource:
    """The form of an answer: what is asked for, calls, or either; raises RequestError.

    Calls are held to the `parameters` of their tools where they are forced, or where a tool is `strict`.
    """
    choice, tools, one_only = values["tool_choice"], values["tools"], not values["parallel_tool_calls"]
    is_forced = choice not in ("auto", "none")
    if is_forced and asked.kind:
        raise wrong(asked.field.split(".")[0], "a form", "no tool_choice beside it that forces calls")
    called = tools if choice in ("auto", "required") else [tool for tool in tools if [_name(tool)] == [*choice]]
    if is_forced and not called:
        wants = "tools to call" if choice == "required" else "the name of one of the tools"
        raise wrong("tool_choice", choice if choice == "required" else choice[0], wants)
    has_rules = is_forced or asked.kind or one_only or any(tool["function"].get("strict") for tool in tools)
    if choice == "none" or not tools or not has_rules:
        return asked
    trigger, before, between, behind, end, separator = FORMATS[tool_format]
    if asked.kind and not trigger:  # both may begin with the same bracket
        raise wrong(asked.field.split(".")[0], "a form", "no tools beside it with this model, or tool_choice = none")
    calls = Calls(
        trigger=trigger,
        before=before,
        between=between,
        behind=behind,
        end=end,
        separator="" if one_only or choice not in ("auto", "required") else separator,
        tools=_schemas(called, is_forced),
        has_text=not is_forced and not asked.kind,
        form=(asked.kind, asked.text),
    )
    source = calls_source(calls, asked.whitespace) if asked.kind else calls_source(calls)
    if len(source.text) > MAX_SOURCE_CHARS or not is_text(source.text):
        wants = f"tools of together at most {MAX_SOURCE_CHARS} characters of valid Unicode where calls have a form"
        raise wrong("tools", tools, wants)
    return source


def _schemas(tools: Sequence[Any], is_forced: bool) -> tuple[tuple[str, Any], ...]:
    """Name and schema of the arguments of each."""
    found = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        if nesting(schema, MAX_NESTING) > MAX_NESTING:
            raise RequestError(f"tools: {shown(_name(tool))} is more than {MAX_NESTING} levels deep", param="tools")
        is_held = is_forced or tool["function"].get("strict")
        found.append((_name(tool), {"type": "object"} | (schema if is_held else {})))
    return tuple(found)


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])
