"""The field `messages`: a conversation, checked and in the form read by chat templates."""

import json

from common.base.json_file import Json, JsonObject
from router.base.json_fields import Field, Table, object_of
from router.base.json_rules import Rule, is_text, one_of, only, string, wrong

MAX_MESSAGES = 4096
MAX_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_ONLY = "this model takes text only"


def content(*kinds: tuple[str, str]) -> Rule:
    """Make a rule: a text, or a list of parts; gives the text, with line breaks between parts.

    Other fields of a part are ignored.

    Args:
        kinds: types of parts, each with the name of the field that has the text.
    """
    first_kind, first_field = kinds[0]
    wants = f'a string, or a list of {{"type": "{first_kind}", "{first_field}": "..."}}'
    parts = [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, field: {"type": "string"}},
            "required": ["type", field],
        }
        for kind, field in kinds
    ]

    def checked(name: str, value: Json) -> str:
        if isinstance(value, list):
            return "\n".join(part(f"{name}[{index}]", each) for index, each in enumerate(value))
        if not is_text(value):
            raise wrong(name, value, f"{wants}, of valid Unicode")
        return str(value)

    def part(name: str, value: Json) -> str:
        if not isinstance(value, dict):
            raise wrong(name, value, wants)
        field = next((field for kind, field in kinds if kind == value.get("type")), "")
        if not field:
            raise wrong(f"{name}.type", value.get("type"), f'"{first_kind}": {TEXT_ONLY}')
        if not is_text(value.get(field)):
            raise wrong(f"{name}.{field}", value.get(field), "a string of valid Unicode")
        return str(value[field])

    return Rule(wants, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}}]}, checked)


def _arguments(name: str, value: Json) -> JsonObject | str:
    """Return the object; a text other than a JSON object stays, because clients send back calls cut off."""
    if isinstance(value, dict):
        return value
    if not is_text(value):
        raise wrong(name, value, f"{ARGUMENTS.wants}, of valid Unicode")
    try:
        found = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else str(value)


ARGUMENTS = Rule(
    "an object, or a string, which is its JSON", {"anyOf": [{"type": "string"}, {"type": "object"}]}, _arguments
)
"""Rule for the arguments of a call."""


def objects(table: Table, required: str, max_objects: int, min_objects: int = 1) -> Rule:
    """Make a rule: a list of objects checked by the same table; gives the present fields of each."""
    wants = f"a list of {min_objects} to {max_objects} objects, each with `{required}`"
    schema = {
        "type": "array",
        "items": table.schema_with(required),
        "minItems": min_objects,
        "maxItems": max_objects,
    }

    def checked(name: str, value: Json) -> list[JsonObject]:
        if not isinstance(value, list) or not min_objects <= len(value) <= max_objects:
            raise wrong(name, value, wants)
        return [one(f"{name}[{index}]", each) for index, each in enumerate(value)]

    def one(name: str, value: Json) -> JsonObject:
        if not isinstance(value, dict):
            raise wrong(name, value, f"an object with `{required}`")
        found = {key: each for key, each in table.read(value, f"{name}.").items() if each is not None}
        table.require(required, found, f"{name}.")
        return found

    return Rule(wants, schema, checked)


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


def _tools(name: str, value: Json) -> list[Json]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise wrong(name, value, TOOLS.wants)
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise wrong(f"{name}[{index}]", tool, TOOLS.wants)
        check_callable(f"{name}[{index}].function", function)
    return value


TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": CALLABLE},
    "required": ["type", "function"],
}
TOOLS = Rule(
    f'a list of at most {MAX_CALLS} {{"type": "function", "function": {{"name": "...", "parameters": {{...}}}}}}',
    {"type": "array", "items": TOOL, "maxItems": MAX_CALLS},
    _tools,
)
"""Rule for callable functions; gives them unchanged, for the template to show."""
FUNCTION = Table(Field("name", string()), Field("arguments", ARGUMENTS, {}), is_open=True)
CALL = Table(
    Field("id", string()),
    Field("type", one_of("function"), "function"),
    Field("function", object_of(FUNCTION)),
    is_open=True,
)
MESSAGE = Table(
    Field("role", one_of(*ROLES)),
    Field("content", content(("text", "text"), ("refusal", "refusal")), None, "required but of an assistant"),
    Field("name", string(128)),
    Field("tool_calls", objects(CALL, "function", MAX_CALLS, min_objects=0)),
    Field("tool_call_id", string(), None, "required of a tool"),
    Field("reasoning_content", string(), None, "what an assistant thought"),
    Field("reasoning", string(), None, "newer name of `reasoning_content`"),
    Field("audio", only(remedy=TEXT_ONLY)),
    Field("function_call", only(remedy="send tool_calls")),
    is_open=True,
)
"""Table of a message, open because client libraries send back whole answers."""
NEEDED = {"tool": ("content", "tool_call_id"), "assistant": ()}
"""Required fields of a message by role; other roles require the content."""


def _messages(name: str, value: Json) -> list[JsonObject]:
    found = enumerate(_LISTED.checked(name, value))
    return [_for_template(message, f"{name}[{index}].") for index, message in found]


def _for_template(message: JsonObject, within: str) -> JsonObject:
    """Return the message with unified names; raise RequestError if a field required by the role is missing.

    An empty list of calls is left out, because some templates take its presence for a call.
    """
    for name in NEEDED.get(message["role"], ("content",)):
        MESSAGE.require(name, message, within)
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    message = {name: value for name, value in message.items() if name != "tool_calls" or value}
    return {"content": ""} | message | ({"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {})


_LISTED = objects(MESSAGE, "role", MAX_MESSAGES)
_BY_ROLE = [
    {
        "properties": {"role": {"const": role}} | {name: MESSAGE.fields[name].rule.schema for name in needed},
        "required": ["role", *needed],
    }
    for role in ROLES
    for needed in [NEEDED.get(role, ("content",))]
]
MESSAGES = Rule(_LISTED.wants, _LISTED.schema | {"items": _LISTED.schema["items"] | {"anyOf": _BY_ROLE}}, _messages)
"""Rule for messages in order; gives messages in the form read by templates."""
