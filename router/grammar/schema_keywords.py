"""Keywords of JSON schemas: allowed values, and whether texts can be held to a keyword."""

from collections.abc import Callable
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.base.json_rules import shown

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
"""Formats enforced by llguidance; JSON Schema treats other formats as annotations."""
UNHELD = (
    "not", "if", "contains", "uniqueItems", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords unknown to llguidance."""
APPLICATORS = (
    "allOf", "anyOf", "oneOf", "$ref", "if", "dependencies", "dependentSchemas", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords with schemas for the value itself."""


class Wish(NamedTuple):
    """Allowed values of a keyword, in words and as a test."""

    wants: str
    is_met: Callable[[Json], bool]


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Json) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_type(value: Json) -> bool:
    return bool(value) and all(name in TYPES for name in (value if isinstance(value, list) else [value]))


def _is_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_STRING = Wish("a string", lambda value: isinstance(value, str))
_NUMBER = Wish("a number", _is_number)
_LIMIT = Wish("a number", lambda value: isinstance(value, bool) or _is_number(value))  # true or false in draft 4
_SIZE = Wish("an integer of at least 0", _is_size)
_SCHEMAS = Wish("a list of schemas, not empty", lambda value: isinstance(value, list) and bool(value))
_NAMED_SCHEMAS = Wish("an object of schemas", lambda value: isinstance(value, dict))
HELD: dict[str, Wish] = {
    "type": Wish(f"one of {', '.join(TYPES)}, or a list of them", _is_type),
    "enum": Wish("a list", lambda value: isinstance(value, list)),
    "const": Wish("any value", lambda value: True),
    "required": Wish("a list of names", _is_names),
    "multipleOf": Wish("a number above 0", lambda value: _is_number(value) and value > 0),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _SIZE),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties"), _NAMED_SCHEMAS),
    **dict.fromkeys(("items", "additionalItems", "additionalProperties"), Wish("a schema", lambda value: True)),
}
"""Keywords enforced on texts; inner schemas are checked when read."""


def check(keyword: str, value: Json, path: str) -> None:
    """Raise ValueError for a value not allowed for a keyword."""
    wish = HELD.get(keyword)
    if wish is not None and not wish.is_met(value):
        raise ValueError(f"{keyword} at {path} = {shown(value)}: wants {wish.wants}")


def changes_nothing(keyword: str, value: Json, schema: JsonObject) -> bool:
    """Tell whether a schema means the same without this keyword of `UNHELD`."""
    match keyword:
        case "uniqueItems":
            return value is not True or schema.get("maxItems") in (0, 1)
        case "if":
            return all(schema.get(each, True) in (True, {}) for each in ("then", "else"))
        case "not":
            return value is False
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return isinstance(value, dict) and all(each in ([], True, {}) for each in value.values())
        case "propertyNames" if isinstance(value, dict):
            return rules_of(value) in ({}, {"type": "string"})
    return value in (True, {})


def rules_of(schema: Json) -> JsonObject:
    """Return keywords of a schema without annotations; empty for a schema not an object."""
    keywords = schema.items() if isinstance(schema, dict) else ()
    rules = {key: value for key, value in keywords if key in HELD or key in UNHELD}
    return {key: value for key, value in rules.items() if key != "format" or value in FORMATS}
