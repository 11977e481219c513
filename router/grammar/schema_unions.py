"""Turns `oneOf` into an `anyOf` of exclusive branches.

llguidance proves that branches exclude each other, but neither looks through references nor compares numbers. So it
gets outlines: schemas of types, constants and properties, with references replaced by their targets. An outline allows
all values of its schema, and perhaps more.
"""

import json
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.grammar.schema_document import Document, Place
from router.grammar.schema_keywords import rules_of

Refusal = Callable[[Json], str]
"""Returns why llguidance refuses a schema; "" if accepted."""
UNSATISFIABLE = "Unsatisfiable schema"
"""Start of llguidance's refusal of a schema without values, which may be a branch of others."""
MAX_BRANCHES = 64
"""Larger unions are not narrowed, because each branch may forbid a property for each other branch."""
MAX_DEPTH = 4
"""Levels of an outline below a branch, references included."""
TYPES = ("null", "boolean", "number", "string", "array", "object")
NUMBER = "\0number"
"""Property of the object that stands for a number in an outline."""


class Narrowing(NamedTuple):
    """Properties required of an object, and forbidden properties."""

    required: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def of(self, schema: JsonObject) -> JsonObject:
        """Narrow a schema of objects."""
        properties = (schema.get("properties") or {}) | dict.fromkeys(self.without, False)
        required = [*(schema.get("required") or ()), *self.required]
        return schema | {"type": "object", "properties": properties, "required": required}


class Unions:
    """Search for a way to make the branches of a `oneOf` exclusive."""

    def __init__(self, document: Document, refusal: Refusal) -> None:
        self._document, self._refusal = document, refusal

    def narrowings(self, schema: JsonObject, objects: Sequence[Place | None]) -> Sequence[Narrowing | None] | None:
        """Return a narrowing for each branch so the branches exclude each other; None if branches may overlap.

        A narrowing is None for a branch already exclusive.

        Args:
            objects: places of the branches, from `object_at`.
        """
        branches = schema["oneOf"]
        around = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        if self._are_exclusive(branches, around):
            return [None] * len(branches)
        places = [place for place in objects if place is not None]
        if len(places) < len(branches) or len(branches) > MAX_BRANCHES:
            return None
        return self._by_tag(places, around) or _by_requirements(places, _required(around))

    def object_at(self, place: Place) -> Place | None:
        """Return the place of a schema of objects, through a single `$ref`; None for others and further references."""
        if isinstance(place.value, dict) and isinstance(place.value.get("$ref"), str):
            if rules_of(place.value).keys() != {"$ref"}:
                return None
            found = self._document.resolve(place.value["$ref"], place.path)
        else:
            found = place
        if found is None or not isinstance(found.value, dict) or "$ref" in found.value:
            return None
        kinds = {"properties": dict, "required": list}
        is_sound = all(isinstance(found.value.get(key, kind()), kind) for key, kind in kinds.items())
        return found if is_sound and found.value.get("type", "object") == "object" else None

    def _are_exclusive(self, branches: Sequence[Json], around: JsonObject) -> bool:
        views = branches, [{"allOf": [around, each]} for each in branches]
        problems = (self._refusal({"oneOf": [self._outline(each, MAX_DEPTH) for each in view]}) for view in views)
        return any(not problem or problem.startswith(UNSATISFIABLE) for problem in problems)

    def _by_tag(self, objects: Sequence[Place], around: JsonObject) -> list[Narrowing] | None:
        """Require the discriminator, which pydantic does not list in `required` if it has a default."""
        tag = around.get("discriminator")
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        if not isinstance(name, str) or any(name not in place.value.get("properties", ()) for place in objects):
            return None
        tagged = around | {"type": "object", "required": [name]}
        is_exclusive = self._are_exclusive([place.value for place in objects], tagged)
        return [Narrowing(required=(name,))] * len(objects) if is_exclusive else None

    def _outline(self, schema: Json, depth: int) -> Json:
        if not isinstance(schema, dict) or depth < 0:
            return schema is not False
        parts: list[Json] = [self._outline(each, depth) for each in _list(schema, "allOf")]
        parts += [{"anyOf": [self._outline(each, depth - 1) for each in _list(schema, keyword)]}
                  for keyword in ("anyOf", "oneOf") if _list(schema, keyword)]  # fmt: skip
        if isinstance(schema.get("$ref"), str) and (place := self._document.resolve(schema["$ref"], "")):
            parts.append(self._outline(place.value, depth - 1))
        if "const" in schema or _list(schema, "enum"):
            parts.append({"anyOf": [*map(_outline_of_value, _list(schema, "enum") or [schema["const"]])]})
        is_of_objects = not schema.keys().isdisjoint(("properties", "required", "additionalProperties"))
        types = schema.get("type") or (TYPES if is_of_objects else ())
        if types:
            names = types if isinstance(types, list | tuple) else [types]
            parts.append({"anyOf": [self._outline_of_type(name, schema, depth) for name in names]})
        return {"allOf": parts} if parts else True

    def _outline_of_type(self, name: Json, schema: JsonObject, depth: int) -> Json:
        if name in ("integer", "number"):
            return _number({"type": "string"})
        if name != "object":
            return {"type": name} if name in TYPES else True
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        named = properties.items() if isinstance(properties, dict) else ()
        found: JsonObject = {key: self._outline(each, depth - 1) for key, each in named}
        outline = {"type": "object", "properties": found | {NUMBER: False}, "required": _required(schema)}
        if "patternProperties" not in schema:
            outline["additionalProperties"] = self._outline(others, depth - 1)
        return outline


def _outline_of_value(value: Json) -> Json:
    if isinstance(value, bool | str | None):
        return {"const": value}
    if isinstance(value, int | float):
        return _number({"const": json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)})
    return {"type": "array"} if isinstance(value, list) else {"type": "object", "properties": {NUMBER: False}}


def _number(text: Json) -> JsonObject:
    return {"type": "object", "properties": {NUMBER: text}, "required": [NUMBER]}


def _by_requirements(objects: Sequence[Place], of_all: Collection[str]) -> list[Narrowing] | None:
    """In each branch, forbid for every other branch a property required only there; None if no such property exists."""
    required = [_required(place.value) for place in objects]
    found = []
    for own in required:
        firsts = [_first(others, {*own, *of_all}) for others in required if others is not own]
        if None in firsts:
            return None
        found.append(Narrowing(without=tuple(dict.fromkeys(name for name in firsts if name is not None))))
    return found


def _list(schema: JsonObject, keyword: str) -> list[Json]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _required(schema: JsonObject) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _first(names: Sequence[str], known: Collection[str]) -> str | None:
    return next((name for name in names if name not in known), None)
