"""The keywords of JSON schemas: what each may be, and which of them texts can be held to."""

from collections.abc import Callable
from typing import Any, NamedTuple

from router.base.json_rules import shown

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
"""Those that llguidance holds texts to; others are annotations, as JSON Schema has it."""
UNHELD = (
    "not", "if", "contains", "uniqueItems", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that llguidance does not know."""
APPLICATORS = (
    "allOf", "anyOf", "oneOf", "$ref", "if", "dependencies", "dependentSchemas", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords with schemas that hold for the same value."""


class Wish(NamedTuple):
    """What a keyword may be."""

    wants: str
    is_met: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_type(value: Any) -> bool:
    return bool(value) and all(name in TYPES for name in (value if isinstance(value, list) else [value]))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_STRING = Wish("a string", lambda value: isinstance(value, str))
_NUMBER = Wish("a number", _is_number)
_LIMIT = Wish("a number", lambda value: isinstance(value, bool) or _is_number(value))  # in draft 4 true or false
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
"""Keywords that texts are held to; a schema is checked where it is read."""


def check(keyword: str, value: Any, path: str) -> None:
    """Raise ValueError for a value that a keyword cannot have."""
    wish = HELD.get(keyword)
    if wish is not None and not wish.is_met(value):
        raise ValueError(f"{keyword} at {path} = {shown(value)}: wants {wish.wants}")


def changes_nothing(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a schema has the same meaning without a keyword of `UNHELD`."""
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


def rules_of(schema: Any) -> dict[str, Any]:
    """The keywords of a schema that are no annotations; none of what is no object."""
    keywords = schema.items() if isinstance(schema, dict) else ()
    rules = {key: value for key, value in keywords if key in HELD or key in UNHELD}
    return {key: value for key, value in rules.items() if key != "format" or value in FORMATS}
