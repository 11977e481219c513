"""The field `input` of /v1/responses: items of a conversation, made into messages for chat templates.

Clients' libraries send items back with fields of all kinds. Fields without meaning for a template are ignored.
"""

from typing import NamedTuple

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.base.json_fields import Field, Table, Values
from router.base.json_rules import Rule, one_of, shown, string, wrong
from router.requests.chat_messages import ARGUMENTS, MAX_MESSAGES, content

SAID = content(("input_text", "text"), ("output_text", "text"), ("text", "text"), ("refusal", "refusal"))
THOUGHT = content(("reasoning_text", "text"), ("summary_text", "text"))


class ItemKind(NamedTuple):
    """Known and required fields of a type of item."""

    table: Table
    required: tuple[str, ...] = ()


ITEMS = {
    "message": ItemKind(
        Table(
            Field("role", one_of("user", "assistant", "system", "developer")),
            Field("content", SAID),
            is_open=True,
        ),
        ("role", "content"),
    ),
    "function_call": ItemKind(
        Table(Field("call_id", string()), Field("name", string()), Field("arguments", ARGUMENTS, {}), is_open=True),
        ("call_id", "name"),
    ),
    "function_call_output": ItemKind(
        Table(Field("call_id", string()), Field("output", SAID), is_open=True), ("call_id", "output")
    ),
    "reasoning": ItemKind(Table(Field("content", THOUGHT, ""), Field("summary", THOUGHT, ""), is_open=True)),
}
TYPES = f"{', '.join([*ITEMS][:-1])} or {[*ITEMS][-1]}"


def _messages(name: str, value: Json) -> list[JsonObject]:
    if isinstance(value, str):
        return [{"role": "user", "content": string().checked(name, value)}]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise wrong(name, value, INPUT.wants)
    conversation = _Conversation()
    for index, item in enumerate(value):
        conversation.add(f"{name}[{index}]", item)
    return conversation.messages


class _Conversation:
    """Messages made of items; consecutive items of the assistant form a single message, like a single answer."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._call_ids: set[str] = set()

    def add(self, name: str, item: Json) -> None:
        """Check and add an item; raise RequestError."""
        if not isinstance(item, dict):
            raise wrong(name, item, "an object with `type`, or with `role` and `content`")
        kind = item.get("type")
        if kind is None and item.get("role") is not None:
            kind = "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            raise _no_such_item(name, kind, item)
        table, required = ITEMS[kind]
        values = table.read(item, f"{name}.")
        for field in required:
            table.require(field, values, f"{name}.")
        match kind:
            case "message":
                self._add_message(values)
            case "function_call":
                self._add_call(values)
            case "function_call_output":
                self._add_output(name, values)
            case "reasoning":
                self._add_thought(values["content"] or values["summary"])

    def _add_message(self, values: Values) -> None:
        if values["role"] == "assistant":
            self._answer_without("content")["content"] = values["content"]
        else:
            self.messages.append(values)

    def _add_call(self, values: Values) -> None:
        function = {"name": values["name"], "arguments": values["arguments"]}
        calls = self._answer_without().setdefault("tool_calls", [])
        calls.append({"id": values["call_id"], "type": "function", "function": function})
        self._call_ids.add(values["call_id"])

    def _add_output(self, name: str, values: Values) -> None:
        call_id = values["call_id"]
        if call_id not in self._call_ids:
            raise wrong(f"{name}.call_id", call_id, "that of a function_call before it: send the call, too")
        self.messages.append({"role": "tool", "content": values["output"], "tool_call_id": call_id})

    def _add_thought(self, text: str) -> None:
        """Add thoughts; the text is empty if thoughts are only encrypted, by another server."""
        if text:
            self._answer_without("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _answer_without(self, *fields: str) -> JsonObject:
        """Return the assistant's last message, or a new message if the last has any of the fields."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(field) for field in fields):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _no_such_item(name: str, kind: Json, item: JsonObject) -> RequestError:
    if kind == "item_reference" or (kind is None and "id" in item):
        message = f"{name} refers to a stored item, and nothing is stored here: send the item itself"
        return RequestError(message, param=name, code="unsupported_value")
    message = f"{name}.type = {shown(kind)} is not supported: send {TYPES}"
    return RequestError(message, param=f"{name}.type", code="unsupported_value")


def _schema(name: str, kind: ItemKind) -> JsonObject:
    """Return the JSON schema of an item; a message needs no type."""
    fields = kind.table.fields
    required = {field: fields[field].rule.schema for field in kind.required}
    schema = kind.table.schema
    types = {"enum": [name, None]} if name == "message" else {"const": name}
    names = [*required] if name == "message" else ["type", *required]
    return schema | {"properties": {"type": types} | schema["properties"] | required, "required": names}


INPUT = Rule(
    f"a string, or a list of 1 to {MAX_MESSAGES} items, each a {TYPES}",
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {"anyOf": [_schema(name, kind) for name, kind in ITEMS.items()]},
                "minItems": 1,
                "maxItems": MAX_MESSAGES,
            },
        ]
    },
    _messages,
)
"""Rule for a user's text, or a list of items; gives checked messages, like `chat_messages.MESSAGES`."""
