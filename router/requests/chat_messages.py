"""The field `messages`: a conversation, checked and in the form read by chat templates."""

import json
from dataclasses import dataclass

from common.base.json_file import Json, JsonObject
from router.base.json_fields import Field, Object, Table
from router.base.json_rules import OneOf, Only, Text, is_text, wrong

MAX_MESSAGES = 4096
MAX_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_ONLY = "this model takes text only"
PARTS = (("text", "text"), ("refusal", "refusal"))
"""Kinds of parts of a content, each with the name of the text field."""


@dataclass(frozen=True, slots=True)
class Content:
    """Rule: a text, or a list of parts; gives the text, with line breaks between parts.

    A refusal is an assistant's text. Other fields of a part are ignored.
    """

    kinds: tuple[tuple[str, str], ...] = PARTS

    @property
    def wants(self) -> str:
        kind, field = self.kinds[0]
        return f'a string, or a list of {{"type": "{kind}", "{field}": "..."}}'

    @property
    def schema(self) -> JsonObject:
        parts = [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, field: {"type": "string"}},
                "required": ["type", field],
            }
            for kind, field in self.kinds
        ]
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}}]}

    def checked(self, name: str, value: Json) -> str:
        if isinstance(value, list):
            return "\n".join(self._part(f"{name}[{index}]", part) for index, part in enumerate(value))
        if not is_text(value):
            raise wrong(name, value, f"{self.wants}, of valid Unicode")
        return str(value)

    def _part(self, name: str, part: Json) -> str:
        if not isinstance(part, dict):
            raise wrong(name, part, self.wants)
        kind = part.get("type")
        field = next((field for known, field in self.kinds if known == kind), "")
        if not field:
            raise wrong(f"{name}.type", kind, f'"{self.kinds[0][0]}": {TEXT_ONLY}')
        if not is_text(part.get(field)):
            raise wrong(f"{name}.{field}", part.get(field), "a string of valid Unicode")
        return str(part[field])


@dataclass(frozen=True, slots=True)
class Arguments:
    """Rule: the arguments of a call, as an object or JSON text; gives the object.

    A text other than a JSON object stays as text, because clients send back calls cut off.
    """

    wants = "an object, or a string, which is its JSON"

    @property
    def schema(self) -> JsonObject:
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}

    def checked(self, name: str, value: Json) -> JsonObject | str:
        if isinstance(value, dict):
            return value
        if not is_text(value):
            raise wrong(name, value, f"{self.wants}, of valid Unicode")
        try:
            found = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else str(value)


@dataclass(frozen=True, slots=True)
class Objects:
    """Rule: a list of objects checked by the same table; gives the present fields of each."""

    table: Table
    required: str
    max_objects: int
    min_objects: int = 1

    @property
    def wants(self) -> str:
        return f"a list of {self.min_objects} to {self.max_objects} objects, each with `{self.required}`"

    @property
    def schema(self) -> JsonObject:
        items = self.table.schema_with(self.required)
        return {"type": "array", "items": items, "minItems": self.min_objects, "maxItems": self.max_objects}

    def checked(self, name: str, value: Json) -> list[JsonObject]:
        if not isinstance(value, list) or not self.min_objects <= len(value) <= self.max_objects:
            raise wrong(name, value, self.wants)
        return [self._object(f"{name}[{index}]", each) for index, each in enumerate(value)]

    def _object(self, name: str, value: Json) -> JsonObject:
        if not isinstance(value, dict):
            raise wrong(name, value, f"an object with `{self.required}`")
        found = {key: each for key, each in self.table.read(value, f"{name}.").items() if each is not None}
        self.table.require(self.required, found, f"{name}.")
        return found


CALLABLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
"""JSON schema of a callable function."""


def check_callable(name: str, function: JsonObject) -> None:
    """Raise RequestError naming the first wrong field of a callable function."""
    for field, is_right, wants in (
        ("name", is_text(function.get("name")), "a string of valid Unicode"),
        ("parameters", isinstance(function.get("parameters"), dict | None), "an object"),
        ("strict", isinstance(function.get("strict"), bool | None), "true or false"),
    ):
        if not is_right:
            raise wrong(f"{name}.{field}", function.get(field), wants)


@dataclass(frozen=True, slots=True)
class Tools:
    """Rule: callable functions; gives the functions unchanged, for the template to show."""

    wants = (
        f'a list of at most {MAX_CALLS} {{"type": "function", "function": {{"name": "...", "parameters": {{...}}}}}}'
    )

    @property
    def schema(self) -> JsonObject:
        tool_properties = {"type": {"const": "function"}, "function": CALLABLE}
        tool = {"type": "object", "properties": tool_properties, "required": ["type", "function"]}
        return {"type": "array", "items": tool, "maxItems": MAX_CALLS}

    def checked(self, name: str, value: Json) -> list[Json]:
        if not isinstance(value, list) or len(value) > MAX_CALLS:
            raise wrong(name, value, self.wants)
        for index, tool in enumerate(value):
            function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(function, dict):
                raise wrong(f"{name}[{index}]", tool, self.wants)
            check_callable(f"{name}[{index}].function", function)
        return value


FUNCTION = Table(Field("name", Text()), Field("arguments", Arguments(), {}), is_open=True)
CALL = Table(
    Field("id", Text()),
    Field("type", OneOf(("function",)), "function"),
    Field("function", Object(FUNCTION)),
    is_open=True,
)
MESSAGE = Table(
    Field("role", OneOf(ROLES)),
    Field("content", Content(), None, "required but of an assistant"),
    Field("name", Text(128)),
    Field("tool_calls", Objects(CALL, "function", MAX_CALLS, min_objects=0)),
    Field("tool_call_id", Text(), None, "required of a tool"),
    Field("reasoning_content", Text(), None, "what an assistant thought"),
    Field("reasoning", Text(), None, "newer name of `reasoning_content`"),
    Field("audio", Only((), TEXT_ONLY)),
    Field("function_call", Only((), "send tool_calls")),
    is_open=True,
)
"""Table of a message, open because client libraries send back whole answers."""
NEEDED = {"tool": ("content", "tool_call_id"), "assistant": ()}
"""Required fields of a message by role; other roles require the content."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Rule: messages in order; gives messages in the form read by templates."""

    messages = Objects(MESSAGE, "role", MAX_MESSAGES)
    wants = messages.wants

    @property
    def schema(self) -> JsonObject:
        schema = self.messages.schema
        by_role = [
            {
                "properties": {"role": {"const": role}} | {name: MESSAGE.fields[name].rule.schema for name in needed},
                "required": ["role", *needed],
            }
            for role in ROLES
            for needed in [NEEDED.get(role, ("content",))]
        ]
        return schema | {"items": schema["items"] | {"anyOf": by_role}}

    def checked(self, name: str, value: Json) -> list[JsonObject]:
        found = self.messages.checked(name, value)
        return [_for_template(message, f"{name}[{index}].") for index, message in enumerate(found)]


def _for_template(message: JsonObject, within: str) -> JsonObject:
    """Return the message with unified names; raise RequestError if a field required by the role is missing."""
    for name in NEEDED.get(message["role"], ("content",)):
        MESSAGE.require(name, message, within)
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return {"content": ""} | message | ({"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {})


MESSAGES = Messages()
