"""The fields of a JSON object that a client sends, as a table: name, rule, default, what it does.

    TABLE = Table(Field("n", Integer(1, 128), 1, "texts for each prompt"), ...)
    values = TABLE.read(body)

An explicit null is the same as an absent field, whatever its name. Any other value under a name that is not in the
table is refused: it may be a typo, or change the output somewhere else. An open table ignores such names.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.base.errors import RequestError
from router.base.json_rules import Only, Rule, shown, wrong

MAX_NAME_CHARS = 64
"""Longer names resemble nothing."""


@dataclass(frozen=True, slots=True)
class Field:
    """One of a table; `about` is for people, in a few words."""

    name: str
    rule: Rule
    default: Any = None
    about: str = ""

    @property
    def words(self) -> str:
        """What it may be and what it does, for people."""
        if not self.is_implemented:
            return f"refused unless it is {self.rule.wants}, which changes nothing"
        return f"{self.rule.wants}; {self.about}" if self.about else self.rule.wants

    @property
    def is_implemented(self) -> bool:
        """Whether any value of it has an effect."""
        return not isinstance(self.rule, Only)

    @property
    def has_default(self) -> bool:
        """Whether leaving it out is the same as some value of it."""
        return self.is_implemented and self.default not in (None, "", ())

    @property
    def schema(self) -> dict[str, Any]:
        """As JSON schema."""
        default = {"default": self.default} if self.has_default else {}
        return {"anyOf": [self.rule.schema, {"type": "null"}], "description": self.words} | default


class Table:
    """All fields that an object may have; an open one ignores all others.

    Args:
        relations: JSON schemas that say which values go together; whoever uses the values checks it.
    """

    def __init__(self, *fields: Field, is_open: bool = False, relations: Sequence[dict[str, Any]] = ()) -> None:
        self.fields = {field.name: field for field in fields}
        self.relations = relations
        self._is_open = is_open
        assert len(self.fields) == len(fields), "a field stands twice in the table"

    def read(self, body: dict[str, Any], within: str = "") -> dict[str, Any]:
        """The value of every field; raises RequestError (400) naming the first that is unknown or wrong.

        `within` goes before each name in errors: that of the object's own field, and a dot.
        """
        for name, value in body.items():
            if not self._is_open and name not in self.fields and value is not None:
                raise self._unknown(name, within)
        return {name: self._value(field, body.get(name), within) for name, field in self.fields.items()}

    def require(self, name: str, values: dict[str, Any], within: str = "") -> None:
        """Raise RequestError if an object has no value of the field."""
        if values.get(name) is None:
            param = within + name
            message = f"{param} is missing: send {self.fields[name].rule.wants}"
            raise RequestError(message, param=param, code="missing_field")

    @property
    def schema(self) -> dict[str, Any]:
        """Of the object, as JSON schema."""
        properties = {name: field.schema for name, field in self.fields.items()}
        others = {} if self._is_open else {"additionalProperties": {"type": "null"}}
        relations = {"allOf": list(self.relations)} if self.relations else {}
        return {"type": "object", "properties": properties} | others | relations

    def schema_with(self, required: str) -> dict[str, Any]:
        """JSON schema of an object in which null is the same as nothing, but not for what is required."""
        schema, field = self.schema, self.fields[required]
        properties = schema["properties"] | {required: field.rule.schema | {"description": field.words}}
        return schema | {"required": [required], "properties": properties}

    @staticmethod
    def _value(field: Field, value: Any, within: str) -> Any:
        return field.default if value is None else field.rule.checked(within + field.name, value)

    def _unknown(self, name: str, within: str) -> RequestError:
        similar = difflib.get_close_matches(name, self.fields, n=1) if len(name) <= MAX_NAME_CHARS else []
        remedy = f"did you mean {within}{similar[0]}?" if similar else "leave it out"
        param = name[:MAX_NAME_CHARS].encode("ascii", "backslashreplace").decode()
        return RequestError(
            f"unknown field {shown(within + name)}: {remedy}", param=within + param, code="unknown_field"
        )


def given(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of objects that have a field, and what it is."""
    return {"properties": {name: schema}, "required": [name]}


def without(name: str) -> dict[str, Any]:
    """A JSON schema of objects in which a field is null, or not there."""
    return {"properties": {name: {"type": "null"}}}


@dataclass(frozen=True, slots=True)
class Object:
    """A rule: an object with a table of its own, and maybe a field that it has to have; gives its values.

    Whoever uses the values checks that the field is there.
    """

    table: Table
    required: str = ""

    @property
    def wants(self) -> str:
        return "an object of " + ", ".join(f"`{name}`" for name in self.table.fields)

    @property
    def schema(self) -> dict[str, Any]:
        return self.table.schema_with(self.required) if self.required else self.table.schema

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, value, self.wants)
        return self.table.read(value, f"{name}.")
