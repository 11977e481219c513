"""The field `tool_choice`: whether an answer may call tools, has to, or has to call one that is named."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import RequestError
from router.chat_answer import CALL, CALL_END, ToolFormat
from router.grammar_source import NO_GRAMMAR, CalledTools, GrammarSource, calls_source, nesting
from router.json_rules import is_text, shown, wrong
from router.structured_fields import MAX_NESTING, MAX_SOURCE_CHARS

CHOICES = ("auto", "none", "required")
FORMATS = {
    ToolFormat.HERMES: (f'{CALL}\n{{"name": ', ', "arguments": ', f"}}\n{CALL_END}", "\n"),
    ToolFormat.LLAMA: ('{"name": ', ', "parameters": ', "}", ""),
}
"""What stands before a name, between it and arguments, behind those, and between calls."""


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


def forced_calls(values: dict[str, Any], tool_format: ToolFormat) -> GrammarSource:
    """The form of an answer that has to call tools, or none; raises RequestError."""
    choice, tools, one_only = values["tool_choice"], values["tools"], not values["parallel_tool_calls"]
    if choice == "auto" and tools and one_only:
        message = "parallel_tool_calls = false: nothing keeps a model from several calls; leave it out"
        raise RequestError(message, param="parallel_tool_calls", code="unsupported_value")
    if choice in ("auto", "none"):
        return NO_GRAMMAR
    called = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == choice[0]]
    if not called:
        wants = "tools to call" if choice == "required" else "the name of one of the tools"
        raise wrong("tool_choice", choice if choice == "required" else choice[0], wants)
    before, between, behind, separator = FORMATS[tool_format]
    separator = "" if one_only or choice != "required" else separator
    source = calls_source(CalledTools(before, between, behind, separator, _schemas(called)), "tools")
    if len(source.text) > MAX_SOURCE_CHARS or not is_text(source.text):
        wants = f"tools of together at most {MAX_SOURCE_CHARS} characters of valid Unicode where they have to be called"
        raise wrong("tools", tools, wants)
    return source


def _schemas(tools: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    """Name and schema of the arguments of each."""
    found = []
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        if nesting(schema, MAX_NESTING) > MAX_NESTING:
            raise RequestError(f"tools: {shown(name)} is more than {MAX_NESTING} levels deep", param="tools")
        found.append((name, {"type": "object"} | schema))
    return tuple(found)
