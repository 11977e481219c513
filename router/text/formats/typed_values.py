"""Values written as text, typed by the JSON schema of their parameter."""

import json
import math
from collections.abc import Mapping

from common.base.json_file import Json, JsonObject

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip
WORDS = {"True": True, "False": False, "None": None}
"""Values in Python's spelling, which templates show to models."""

MAX_REFERENCES = 8
"""Most references followed from one to the next."""
ToolSchemas = Mapping[str, JsonObject]
"""JSON schemas of the parameters of tools, by tool name."""


def properties_of(schema: Json) -> JsonObject:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def typed(value: str, allowed: set[str]) -> Json:
    """Return the value in one of the allowed types; text where it is allowed alone, or nothing else fits."""
    if allowed == {"string"}:
        return value
    try:
        word = value.strip()
        read = WORDS[word] if word in WORDS else json.loads(value, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return value
    is_fitting = any(isinstance(read, TYPES[name]) and _is_no_flag(read, name) for name in allowed if name in TYPES)
    return read if is_fitting else value


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    if math.isinf(read := float(number)):
        raise ValueError(f"{number} is too large")
    return read


def _is_no_flag(read: Json, name: str) -> bool:
    """Tell true and false from the numbers that they are in Python."""
    return name == "boolean" or not isinstance(read, bool)


def types_of(schema: Json, root: Json) -> set[str]:
    """Return the types that a parameter's schema allows, inside the schema `root`: text, if it says nothing."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return {"string"}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return set().union(*(types_of(each, root) for each in schema[key])) or {"string"}
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)} or {"string"}
    if isinstance(kinds, str):
        return {kinds}
    if "properties" in schema:
        return {"object"}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {name for value in values for name, kinds in TYPES.items() if type(value) in kinds} or {"string"}
    return {"string"}


def resolved(schema: Json, root: Json) -> Json:
    """Follow references to definitions inside `root`, at most `MAX_REFERENCES`."""
    for _ in range(MAX_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        schema = root
        for name in path[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
