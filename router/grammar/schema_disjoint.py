"""Decides whether JSON schemas have no value in common, so `oneOf` equals `anyOf`."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations

from common.base.json_file import Json, JsonObject
from router.grammar.schema_document import Document

MAX_STEPS = 50_000
"""Comparisons for a document, about 0.1 s together; beyond, nothing is proven."""
MAX_DEPTH = 16
KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
KINDS_OF = {name: frozenset({name}) for name in KINDS} | {"number": frozenset({"integer", "fraction"})}
UNIONS = ("anyOf", "oneOf")


class Disjointness:
    """Comparison of a document's schemas. False means not proven."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._num_steps = 0

    def of_all(self, branches: Sequence[Json], around: JsonObject) -> bool:
        """Compare all pairs of branches; the keywords `around` hold for each branch."""
        views = [_View([around, branch], self._document) for branch in branches]
        return all(self._between(one, other, 0) for one, other in combinations(views, 2))

    def _between(self, one: "_View", other: "_View", depth: int) -> bool:
        self._num_steps += 1
        if depth > MAX_DEPTH or self._num_steps > MAX_STEPS:
            return False
        if self._plain_between(one, other, depth):
            return True
        return any(
            all(self._between(branch, against, depth + 1) for branch in branches)
            for view, against in ((one, other), (other, one))
            for branches in view.unions
        )

    def _plain_between(self, one: "_View", other: "_View", depth: int) -> bool:
        """Compare without unions: by kinds, by listed values, and by properties required in either schema."""
        if one.is_empty or other.is_empty:
            return True
        if one.listed is not None and other.listed is not None and not one.listed & other.listed:
            return True
        common = one.kinds & other.kinds
        if common != {"object"}:
            return not common
        names = one.required | other.required
        return any(self._between(one.property(name), other.property(name), depth + 1) for name in names)


class _View:
    """Schemas that hold at once, with the contents of `allOf` and `$ref` merged in."""

    def __init__(self, schemas: Sequence[Json], document: Document) -> None:
        self._document = document
        self._schemas: list[JsonObject] = []
        self._properties: dict[str, _View] = {}
        self.is_empty = False
        pending, seen = [*schemas], set[str]()
        while pending:
            schema = pending.pop()
            if not isinstance(schema, dict):
                self.is_empty |= schema is False
                continue
            self._schemas.append(schema)
            pending += _list(schema, "allOf")
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                place = document.resolve(reference, "")
                pending += [] if place is None else [place.value]

    @cached_property
    def unions(self) -> list[list["_View"]]:
        """Branches of each union, each together with the surrounding keywords except unions."""
        left_out = (*UNIONS, "allOf", "$ref")
        plain = [{key: each for key, each in schema.items() if key not in left_out} for schema in self._schemas]
        return [
            [_View([*plain, branch], self._document) for branch in _list(schema, keyword)]
            for schema in self._schemas
            for keyword in UNIONS
            if _list(schema, keyword)
        ]

    @cached_property
    def kinds(self) -> frozenset[str]:
        kinds = KINDS
        for schema in self._schemas:
            if (named := schema.get("type")) is not None:
                names = named if isinstance(named, list) else [named]
                kinds &= frozenset().union(*(KINDS_OF.get(name, KINDS) for name in names if isinstance(name, str)))
        if self.listed is not None:
            kinds &= {_kind(json.loads(value)) for value in self.listed}
        return kinds

    @cached_property
    def listed(self) -> frozenset[str] | None:
        """Values allowed by `enum` and `const`, as JSON; None without a limit."""
        found: frozenset[str] | None = None
        for values in self._lists():
            texts = frozenset(map(_text, values))
            found = texts if found is None else found & texts
        return found

    @cached_property
    def required(self) -> frozenset[str]:
        names = [name for schema in self._schemas for name in _list(schema, "required")]
        return frozenset(name for name in names if isinstance(name, str))

    def property(self, name: str) -> "_View":
        """Return the view of a property's schemas."""
        if name not in self._properties:
            self._properties[name] = _View([*self._of_property(name)], self._document)
        return self._properties[name]

    def _of_property(self, name: str) -> Iterator[Json]:
        for schema in self._schemas:
            properties = schema.get("properties")
            if isinstance(properties, dict) and name in properties:
                yield properties[name]
            elif "additionalProperties" in schema and "patternProperties" not in schema:
                yield schema["additionalProperties"]

    def _lists(self) -> Iterator[list[Json]]:
        for schema in self._schemas:
            if isinstance(schema.get("enum"), list):
                yield schema["enum"]
            if "const" in schema:
                yield [schema["const"]]


def _list(schema: JsonObject, keyword: str) -> list[Json]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _text(value: Json) -> str:
    """Write equal values equally, also in lists and objects; 1 equals 1.0."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _kind(value: Json) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
