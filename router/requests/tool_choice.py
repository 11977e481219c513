"""The field `tool_choice`: tools allowed or required in an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.base.json_fields import Values
from router.base.json_rules import Rule, is_text, shown, wrong
from router.grammar.call_rules import Calls
from router.grammar.source import NO_GRAMMAR, GrammarSource, calls_source, nesting
from router.requests.structured_fields import MAX_NESTING, MAX_SOURCE_CHARS
from router.text.formats.shapes import SHAPES, ToolFormat

Mode = Literal["none", "auto", "required"]
MODES: tuple[Mode, ...] = ("none", "auto", "required")
FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
"""JSON schema of a named function."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Tools allowed in an answer, and whether a call is required."""

    mode: Mode
    names: tuple[str, ...] = ()  # allowed tools; empty: all
    is_one: bool = False  # a single call

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"

    def among(self, tools: Sequence[Json]) -> list[Json]:
        """Return the allowed tools; raise RequestError for an unknown name, or for required calls without tools."""
        known = set(map(_name, tools))
        for name in self.names:
            if name not in known:
                raise wrong("tool_choice", name, "the name of one of the tools")
        if self.is_forced and not tools:
            raise wrong("tool_choice", self.mode, "tools to call")
        return [tool for tool in tools if not self.names or _name(tool) in self.names]


AUTO, NONE = Choice("auto"), Choice("none")


def _choice(name: str, value: Json) -> Choice:
    for mode in MODES:
        if value == mode:
            return Choice(mode)
    if (called := _function_name(value)) is not None:
        return Choice("required", (called,), is_one=True)
    is_allowed = isinstance(value, dict) and value.get("type") == "allowed_tools"
    allowed = value.get("allowed_tools") if is_allowed else None
    if not isinstance(allowed, dict):
        raise wrong(name, value, TOOL_CHOICE.wants)
    return Choice(_mode(name, allowed), _names(name, allowed))


def _mode(name: str, allowed: JsonObject) -> Mode:
    for mode in MODES[1:]:
        if allowed.get("mode") == mode:
            return mode
    raise wrong(f"{name}.allowed_tools.mode", allowed.get("mode"), '"auto" or "required"')


def _names(name: str, allowed: JsonObject) -> tuple[str, ...]:
    tools = allowed.get("tools")
    names = list(map(_function_name, tools)) if isinstance(tools, list) else []
    named = tuple(each for each in names if each is not None)
    if not named or len(named) < len(names):
        wants = 'a list of at least one {"type": "function", "function": {"name": "..."}}'
        raise wrong(f"{name}.allowed_tools.tools", tools, wants)
    return named


def allowed_tools(function: JsonObject) -> JsonObject:
    """Return the JSON schemas of a mode and of the tools allowed in it, each named by `function`."""
    return {"mode": {"enum": list(MODES[1:])}, "tools": {"type": "array", "items": function, "minItems": 1}}


SOME = {"type": "object", "properties": allowed_tools(FUNCTION), "required": ["mode", "tools"]}
ALLOWED = {
    "type": "object",
    "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": SOME},
    "required": ["type", "allowed_tools"],
}
TOOL_CHOICE = Rule(
    '"auto", "none", "required", {"type": "function", "function": {"name": "..."}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}',
    {"anyOf": [{"enum": list(MODES)}, FUNCTION, ALLOWED]},
    _choice,
)
"""Rule for a mode, a function, or some of the tools with a mode; gives a `Choice`."""


def form_of(
    values: Values, tool_format: ToolFormat, asked: GrammarSource, free: GrammarSource = NO_GRAMMAR
) -> GrammarSource:
    """Return the form of an answer: the requested form, calls, or either; raise RequestError.

    A call must match the `parameters` of the tool if calls are forced, or if the tool is `strict`. The requested form
    applies to answers without calls, so forced calls ignore the requested form. An otherwise unconstrained answer has
    the form `free`. If `free` is a form, answers with optional calls get a form, too.
    """
    choice, one_only = values["tool_choice"] or AUTO, not values["parallel_tool_calls"]
    if choice.is_forced:
        asked = NO_GRAMMAR
    tools = choice.among(values["tools"])
    if choice == NONE or not tools:
        return asked if asked.kind else free
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not (choice != AUTO or asked.kind or free.kind or one_only or is_strict):
        return NO_GRAMMAR
    shape = SHAPES[tool_format]
    if asked.kind and not (shape.trigger or shape.header):  # calls and the form may begin with the same bracket
        raise wrong(asked.field.split(".")[0], "a form", "no tools beside it with this model, or tool_choice = none")
    calls = Calls(
        tool_format.value,
        tools=_schemas(tools, choice.is_forced),
        is_one=one_only or choice.is_one,
        has_text=not choice.is_forced and not asked.kind,
        form=(asked.kind, asked.text, asked.strict),
    )
    source = calls_source(calls, asked.whitespace) if asked.kind else calls_source(calls)
    if len(source.text) > MAX_SOURCE_CHARS or not is_text(source.text):
        wants = f"tools of together at most {MAX_SOURCE_CHARS} characters of valid Unicode where calls have a form"
        raise wrong("tools", tools, wants)
    return source


def forced_names(values: Values) -> tuple[str, ...]:
    """Return the names of tools from which a forced call must choose; empty without forced calls."""
    choice = values["tool_choice"] or AUTO
    return tuple(map(_name, choice.among(values["tools"]))) if choice.is_forced else ()


def _schemas(tools: Sequence[Json], is_forced: bool) -> tuple[tuple[str, Json, bool], ...]:
    """Return name, schema of arguments, and strictness of each tool."""
    found = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        if nesting(schema, MAX_NESTING) > MAX_NESTING:
            raise RequestError(f"tools: {shown(_name(tool))} is more than {MAX_NESTING} levels deep", param="tools")
        is_strict = bool(tool["function"].get("strict"))
        found.append((_name(tool), {"type": "object"} | (schema if is_forced or is_strict else {}), is_strict))
    return tuple(found)


def _name(tool: JsonObject) -> str:
    return str(tool["function"]["name"])


def _function_name(value: Json) -> str | None:
    """Return the name of a named function, or None."""
    is_function = isinstance(value, dict) and value.get("type") == "function"
    function = value.get("function") if is_function else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if is_text(name) else None
