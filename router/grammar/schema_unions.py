"""Turns `oneOf` into an `anyOf` of exclusive branches, because llguidance knows no other union."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from common.base.json_file import JsonObject
from router.grammar.schema_disjoint import Disjointness
from router.grammar.schema_document import Document, Place
from router.grammar.schema_keywords import rules_of

MAX_BRANCHES = 64
"""Larger unions are not narrowed, because each branch may forbid a property for each other branch."""


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

    def __init__(self, document: Document) -> None:
        self._document = document
        self._disjointness = Disjointness(document)

    def narrowings(self, schema: JsonObject, objects: Sequence[Place | None]) -> Sequence[Narrowing | None] | None:
        """Return a narrowing for each branch so the branches exclude each other; None if branches may overlap.

        A narrowing is None for a branch already exclusive.

        Args:
            objects: places of the branches, from `object_at`.
        """
        branches = schema["oneOf"]
        around = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        if self._disjointness.of_all(branches, around):
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

    def _by_tag(self, objects: Sequence[Place], around: JsonObject) -> list[Narrowing] | None:
        """Require the discriminator, which pydantic does not list in `required` if it has a default."""
        tag = around.get("discriminator")
        name = tag.get("propertyName") if isinstance(tag, dict) else None
        if not isinstance(name, str) or any(name not in place.value.get("properties", ()) for place in objects):
            return None
        tagged = around | {"type": "object", "required": [name]}
        is_told_apart = self._disjointness.of_all([place.value for place in objects], tagged)
        return [Narrowing(required=(name,))] * len(objects) if is_told_apart else None


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


def _required(schema: JsonObject) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _first(names: Sequence[str], known: Collection[str]) -> str | None:
    return next((name for name in names if name not in known), None)
