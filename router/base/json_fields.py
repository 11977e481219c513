"""Fields of a client's JSON object, declared as a table: name, rule, default, description.

    TABLE = Table(Field("n", integer(1, 128), 1, "texts for each prompt"), ...)
    values = TABLE.read(body)

An explicit null equals an absent field, for any name. Any other value of an unknown name is refused. An unknown name
may be a typo, or change the output on another server. An open table ignores unknown names.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.base.json_rules import Rule, shown, wrong

Values: TypeAlias = dict[str, Any]
"""Values of fields by name, in the form that each field's rule gives."""
MAX_NAME_CHARS = 64
"""Longer names get no suggestion."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a table; `about` is a short description for people."""

    name: str
    rule: Rule
    default: object = None  # in the rule's form
    about: str = ""

    @property
    def words(self) -> str:
        """Accepted values and effect, for people."""
        if not self.is_implemented:
            return f"refused unless it is {self.rule.wants}, which changes nothing"
        return f"{self.rule.wants}; {self.about}" if self.about else self.rule.wants

    @property
    def is_implemented(self) -> bool:
        """True if some value has an effect."""
        return self.rule.neutral is None

    @property
    def has_default(self) -> bool:
        """True if an absent field equals some value."""
        return self.is_implemented and self.default not in (None, "", ())

    @property
    def schema(self) -> JsonObject:
        """JSON schema of the field."""
        default = {"default": self.default} if self.has_default else {}
        return {"anyOf": [self.rule.schema, {"type": "null"}], "description": self.words} | default


class Table:
    """All fields allowed in an object; an open table ignores others.

    Args:
        relations: JSON schemas of values allowed together; documentation only, checked by the user of the values.
    """

    def __init__(self, *fields: Field, is_open: bool = False, relations: Sequence[JsonObject] = ()) -> None:
        self.fields = {field.name: field for field in fields}
        self.relations = relations
        self._is_open = is_open
        assert len(self.fields) == len(fields), "a field stands twice in the table"

    def read(self, body: JsonObject, within: str = "") -> Values:
        """Return the value of every field; raises RequestError (400) for the first unknown or wrong field.

        Args:
            within: prefix of names in errors: the object's own field, and a dot.
        """
        for name, value in body.items():
            if not self._is_open and name not in self.fields and value is not None:
                raise self._unknown(name, within)
        return {name: self._value(field, body.get(name), within) for name, field in self.fields.items()}

    def require(self, name: str, values: Values, within: str = "") -> None:
        """Raise RequestError if the field has no value."""
        if values.get(name) is None:
            param = within + name
            message = f"{param} is missing: send {self.fields[name].rule.wants}"
            raise RequestError(message, param=param, code="missing_field")

    @property
    def schema(self) -> JsonObject:
        """JSON schema of the object."""
        properties = {name: field.schema for name, field in self.fields.items()}
        others = {} if self._is_open else {"additionalProperties": {"type": "null"}}
        relations = {"allOf": list(self.relations)} if self.relations else {}
        return {"type": "object", "properties": properties} | others | relations

    def schema_with(self, required: str) -> JsonObject:
        """Return the object's JSON schema with a required field, which must not be null."""
        schema, field = self.schema, self.fields[required]
        properties = schema["properties"] | {required: field.rule.schema | {"description": field.words}}
        return schema | {"required": [required], "properties": properties}

    @staticmethod
    def _value(field: Field, value: Json, within: str) -> object:
        return field.default if value is None else field.rule.checked(within + field.name, value)

    def _unknown(self, name: str, within: str) -> RequestError:
        similar = difflib.get_close_matches(name, self.fields, n=1) if len(name) <= MAX_NAME_CHARS else []
        remedy = f"did you mean {within}{similar[0]}?" if similar else "leave it out"
        param = name[:MAX_NAME_CHARS].encode("ascii", "backslashreplace").decode()
        return RequestError(
            f"unknown field {shown(within + name)}: {remedy}", param=within + param, code="unknown_field"
        )


def given(name: str, schema: JsonObject) -> JsonObject:
    """Return a JSON schema of objects with this field and value schema."""
    return {"properties": {name: schema}, "required": [name]}


def without(name: str) -> JsonObject:
    """Return a JSON schema of objects with this field null or absent."""
    return {"properties": {name: {"type": "null"}}}


def object_of(table: Table, required: str = "") -> Rule:
    """Make a rule: an object with a table of its own, perhaps with a required field; gives the values.

    The user of the values checks for the required field.
    """
    wants = "an object of " + ", ".join(f"`{name}`" for name in table.fields)

    def checked(name: str, value: Json) -> Values:
        if not isinstance(value, dict):
            raise wrong(name, value, wants)
        return table.read(value, f"{name}.")

    return Rule(wants, table.schema_with(required) if required else table.schema, checked, table=table)
