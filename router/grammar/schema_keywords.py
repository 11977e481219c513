"""Keywords of JSON schemas that llguidance enforces on texts, and keywords that it cannot."""

from common.base.json_file import Json, JsonObject

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
"""Formats enforced by llguidance; JSON Schema treats other formats as annotations."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords with a list of schemas."""
MAPS = ("properties", "patternProperties")
"""Keywords with schemas by name."""
SINGLES = ("items", "additionalItems", "additionalProperties")
"""Keywords with a schema; `items` of older drafts may have a list."""
HELD = (
    *LISTS, *MAPS, *SINGLES, "type", "enum", "const", "required", "multipleOf", "pattern", "format", "$ref", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties",
)  # fmt: skip
"""Keywords enforced on texts."""
UNHELD = (
    "not", "if", "contains", "uniqueItems", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords unknown to llguidance."""
APPLICATORS = (
    "allOf", "anyOf", "oneOf", "$ref", "if", "dependencies", "dependentSchemas", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords with schemas for the value itself."""


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
