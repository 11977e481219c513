"""The field `messages`: who said what, as chat templates take it."""

import json
from dataclasses import dataclass
from typing import Any

from common.errors import RequestError
from router.json_fields import Field, Object, Table
from router.json_rules import OneOf, Only, Text, is_text, wrong

MAX_MESSAGES = 4096
MAX_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_ONLY = "this model takes text only"


@dataclass(frozen=True, slots=True)
class Content:
    """A rule: a text, or a list of its parts; gives the text, a line break between the parts."""

    wants = 'a string, or a list of {"type": "text", "text": "..."}'

    @property
    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": {"type": "null"},
        }
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}

    def checked(self, name: str, value: Any) -> str:
        if isinstance(value, list):
            return "\n".join(self._part(f"{name}[{index}]", part) for index, part in enumerate(value))
        if not is_text(value):
            raise wrong(name, value, f"{self.wants}, of valid Unicode")
        return str(value)

    def _part(self, name: str, part: Any) -> str:
        if not isinstance(part, dict):
            raise wrong(name, part, self.wants)
        if part.get("type") != "text":
            raise wrong(f"{name}.type", part.get("type"), f'"text": {TEXT_ONLY}')
        for key in part.keys() - {"type", "text"}:
            if part[key] is not None:
                raise RequestError(f"{name} has fields beside type and text: leave them out", param=name)
        if not is_text(part.get("text")):
            raise wrong(f"{name}.text", part.get("text"), "a string of valid Unicode")
        return str(part["text"])


@dataclass(frozen=True, slots=True)
class Arguments:
    """A rule: what a function was called with, as JSON of an object or an object; gives the object."""

    wants = "an object, or a string that is the JSON of one"

    @property
    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise wrong(name, value, self.wants)
        return found


@dataclass(frozen=True, slots=True)
class Objects:
    """A rule: a list of objects, each with the same table; gives what each has, nothing for what it has not."""

    table: Table
    required: str
    max_objects: int
    min_objects: int = 1

    @property
    def wants(self) -> str:
        return f"a list of {self.min_objects} to {self.max_objects} objects, each with `{self.required}`"

    @property
    def schema(self) -> dict[str, Any]:
        items = self.table.schema_with(self.required)
        return {"type": "array", "items": items, "minItems": self.min_objects, "maxItems": self.max_objects}

    def checked(self, name: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not self.min_objects <= len(value) <= self.max_objects:
            raise wrong(name, value, self.wants)
        return [self._object(f"{name}[{index}]", each) for index, each in enumerate(value)]

    def _object(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, value, f"an object with `{self.required}`")
        found = {key: each for key, each in self.table.read(value, f"{name}.").items() if each is not None}
        self.table.require(self.required, found, f"{name}.")
        return found


@dataclass(frozen=True, slots=True)
class Tools:
    """A rule: functions that may be called; gives them as they are, for the template to show."""

    wants = (
        f'a list of at most {MAX_CALLS} {{"type": "function", "function": {{"name": "...", "parameters": {{...}}}}}}'
    )

    @property
    def schema(self) -> dict[str, Any]:
        properties = {"name": {"type": "string"}, "parameters": {"type": "object"}}
        function = {"type": "object", "properties": properties, "required": ["name"]}
        tool_properties = {"type": {"const": "function"}, "function": function}
        tool = {"type": "object", "properties": tool_properties, "required": ["type", "function"]}
        return {"type": "array", "items": tool, "maxItems": MAX_CALLS}

    def checked(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > MAX_CALLS:
            raise wrong(name, value, self.wants)
        for index, tool in enumerate(value):
            function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(function, dict) or not is_text(function.get("name")):
                raise wrong(f"{name}[{index}]", tool, self.wants)
            if not isinstance(function.get("parameters", {}), dict):
                raise wrong(f"{name}[{index}].function.parameters", function["parameters"], "an object")
            if not isinstance(function.get("strict") or False, bool):
                raise wrong(f"{name}[{index}].function.strict", function["strict"], "true or false")
        return value


FUNCTION = Table(Field("name", Text()), Field("arguments", Arguments(), {}))
CALL = Table(Field("id", Text()), Field("type", OneOf(("function",)), "function"), Field("function", Object(FUNCTION)))
MESSAGE = Table(
    Field("role", OneOf(ROLES)),
    Field("content", Content(), ""),
    Field("name", Text(128)),
    Field("tool_calls", Objects(CALL, "function", MAX_CALLS, min_objects=0)),
    Field("tool_call_id", Text()),
    Field("reasoning_content", Text()),
    Field("refusal", Only()),
    Field("annotations", Only(([],))),
    Field("audio", Only((), TEXT_ONLY)),
    Field("function_call", Only((), "send tool_calls")),
)
MESSAGES = Objects(MESSAGE, "role", MAX_MESSAGES)
