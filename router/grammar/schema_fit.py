"""Fits a JSON schema to the keywords that llguidance enforces.

Unknown keywords are dropped and reported; in `strict` mode an unknown keyword is an error. Without a report, the fitted
schema may be stricter than the original, never wider. So every text of the fitted schema is valid.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.base.json_rules import shown
from router.grammar.schema_document import ROOT, Document, Place
from router.grammar.schema_keywords import (
    APPLICATORS,
    FORMATS,
    HELD,
    LISTS,
    MAPS,
    SINGLES,
    UNHELD,
    changes_nothing,
    rules_of,
)
from router.grammar.schema_unions import UNSATISFIABLE, Narrowing, Refusal, Unions

DEFINITIONS = "$defs"
LETTERS = re.compile(r"[^a-zA-Z0-9_]")
MAX_NAME_CHARS = 40
CONTEXT = ("type", "required", "properties", "additionalProperties")
"""Keywords that decide whether llguidance takes others."""
DOUBTFUL = (
    "pattern", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "patternProperties",
    "minProperties", "maxProperties",
)  # fmt: skip
"""Keywords for which llguidance takes only some values."""
INVALID = ("Expected ", "invalid ")
"""Starts of llguidance's refusals of values that no schema may have."""
MAX_NUMBER = 9 * 10**18
"""About the largest number of llguidance; with limits, numbers beyond are forbidden."""


class Fit(NamedTuple):
    """A schema for llguidance, and descriptions of dropped keywords."""

    schema: Json
    dropped: tuple[str, ...] = ()


def fit(schema: Json, refusal: Refusal, *, strict: bool, is_refused: bool = False) -> Fit:
    """Fit a schema.

    Raises ValueError for an invalid schema, and for keywords not enforceable in `strict` mode.

    Args:
        is_refused: a fitted schema was refused, so each keyword is tried alone.
    """
    if isinstance(schema, bool):
        return Fit(schema)
    return _Fitting(schema, refusal, strict=strict, is_refused=is_refused).fitted()


class _Fitting:
    """A single pass through a schema. Methods take a client's schema, or a part, with its path."""

    def __init__(self, schema: Json, refusal: Refusal, *, strict: bool, is_refused: bool) -> None:
        self._document = Document(schema)
        self._unions = Unions(self._document, refusal)
        self._refusal, self._strict, self._is_refused = refusal, strict, is_refused
        self._names: dict[tuple[str, Narrowing | None], str] = {}  # names of definitions, by path
        self._pending: list[tuple[str, Place]] = []
        self._dropped: dict[str, None] = {}

    def fitted(self) -> Fit:
        path, schema = self._document.root
        found = self._schema(schema, path)
        definitions: JsonObject = {}
        while self._pending:  # iterative, because a chain of definitions may be long
            name, place = self._pending.pop()
            definitions[name] = self._schema(place.value, place.path)
        if definitions:
            found = found | {DEFINITIONS: definitions}
        return Fit(found, tuple(self._dropped))

    def _schema(self, schema: Json, path: str) -> Json:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{path} = {shown(schema)}: wants a schema, which is an object, true or false")
        schema = {keyword: value for keyword, value in schema.items() if value is not None or keyword == "const"}
        if schema.get("not") in ({}, True):
            return False
        fitted: JsonObject = {}
        for keyword, value in schema.items():
            if keyword in HELD:
                for name, held in self._held(keyword, value, schema, path).items():
                    _put(fitted, name, held)
        for keyword in UNHELD:
            if keyword in schema:
                self._put_unheld(keyword, schema, fitted, path)
        if self._is_refused:
            self._drop_refused(fitted, path)
        return fitted

    def _held(self, keyword: str, value: Json, schema: JsonObject, path: str) -> JsonObject:
        inner = f"{path}/{keyword}"
        if keyword == "$ref" and isinstance(value, str):
            place = self._document.resolve(value, path)
            if place is None:
                self._drop("$ref", path, "only what is in the schema itself can be referred to")
                return {}
            return {"$ref": self._reference(place)}
        if keyword == "format" and isinstance(value, str) and value not in FORMATS:
            return {}
        if keyword == "additionalItems" and not isinstance(schema.get("items"), list):
            return {}  # otherwise llguidance would drop prefixItems
        if keyword == "oneOf" and isinstance(value, list):
            return {"anyOf": self._one_of(schema, path)}
        if keyword in (*LISTS, "items") and isinstance(value, list):
            return {keyword: self._list(value, inner)}
        if keyword in MAPS and isinstance(value, dict):
            place = Place(inner, value)
            return {keyword: {name: self._schema(each, place.at(name)) for name, each in value.items()}}
        return {keyword: self._schema(value, inner) if keyword in SINGLES else _number(keyword, value)}

    def _list(self, schemas: Sequence[Json], path: str) -> list[Json]:
        return [self._schema(each, f"{path}/{index}") for index, each in enumerate(schemas)]

    def _reference(self, place: Place, narrowing: Narrowing | None = None) -> str:
        """Return a reference to a place; makes a definition at first use."""
        if place.path == ROOT and narrowing is None:
            return ROOT
        key = place.path, narrowing
        if key not in self._names:
            self._names[key] = f"{LETTERS.sub('', place.path.rpartition('/')[2])[:MAX_NAME_CHARS]}-{len(self._names)}"
            value = place.value if narrowing is None else narrowing.of(place.value)
            self._pending.append((self._names[key], Place(place.path, value)))
        return f"{ROOT}/{DEFINITIONS}/{self._names[key]}"

    def _one_of(self, schema: JsonObject, path: str) -> list[Json]:
        """Return branches for `anyOf` in place of `oneOf`."""
        branches, inner = schema["oneOf"], f"{path}/oneOf"
        objects = [self._unions.object_at(Place(f"{inner}/{index}", each)) for index, each in enumerate(branches)]
        narrowings = self._unions.narrowings(schema, objects)
        if narrowings is None:
            self._drop("oneOf", path, "its branches may overlap", "is taken for anyOf")
            return self._list(branches, inner)
        return [
            self._branch(Place(f"{inner}/{index}", branch), place, narrowing)
            for index, (branch, place, narrowing) in enumerate(zip(branches, objects, narrowings, strict=True))
        ]

    def _branch(self, branch: Place, target: Place | None, narrowing: Narrowing | None) -> Json:
        if target is None or narrowing is None:
            return self._schema(branch.value, branch.path)
        if target == branch:
            return self._schema(narrowing.of(branch.value), branch.path)
        return {"$ref": self._reference(target, narrowing)}

    def _put_unheld(self, keyword: str, schema: JsonObject, fitted: JsonObject, path: str) -> None:
        """Drop a keyword, unless the keyword changes nothing or others can express it."""
        value = schema[keyword]
        if changes_nothing(keyword, value, schema):
            return
        if keyword == "propertyNames" and self._put_names(value, schema, fitted, path):
            return
        if keyword == "unevaluatedProperties" and not any(each in schema for each in APPLICATORS):
            fitted.setdefault("additionalProperties", self._schema(value, f"{path}/{keyword}"))
            return
        self._drop(keyword, path)

    def _put_names(self, names: Json, schema: JsonObject, fitted: JsonObject, path: str) -> bool:
        """Express `propertyNames` by other keywords: listed names, or a single pattern. Return False if impossible."""
        rules = rules_of(names)
        if rules.keys() == {"$ref"} and isinstance(rules["$ref"], str):
            place = self._document.resolve(rules["$ref"], path)
            rules = rules_of(None if place is None else place.value)
        if not rules or rules.pop("type", "string") != "string" or "patternProperties" in schema:
            return False
        others = fitted.get("additionalProperties", True)
        listed = rules.get("enum", [rules["const"]] if "const" in rules else None)
        if len(rules) == 1 and isinstance(listed, list):
            known = fitted.get("properties", {})
            fitted["properties"] = {name: each if name in listed else False for name, each in known.items()}
            fitted["properties"] |= {name: others for name in listed if isinstance(name, str) and name not in known}
            fitted["additionalProperties"] = False
            return True
        pattern = rules.get("pattern")
        if rules.keys() <= {"minLength", "maxLength"}:
            pattern = f"^[\\s\\S]{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}}$"
        elif rules.keys() != {"pattern"}:
            return False
        if not isinstance(pattern, str) or "properties" in schema:
            return False
        fitted |= {"patternProperties": {pattern: others}, "additionalProperties": False}
        return True

    def _drop_refused(self, fitted: JsonObject, path: str) -> None:
        """Try each keyword alone, with all values allowed inside; drop doubtful keywords that llguidance refuses.

        Raises ValueError for others. Doubtful keywords are tried together with the keywords before.
        """
        taken: JsonObject = {}
        for keyword in sorted(fitted.keys() - {"$ref"}, key=[*CONTEXT, *HELD].index):
            tried = _hollow(keyword, fitted[keyword])
            is_doubtful = keyword in DOUBTFUL
            problem = self._refusal(taken | {keyword: tried} if is_doubtful else {keyword: tried})
            if problem and is_doubtful and not problem.startswith(INVALID):
                del fitted[keyword]
                self._drop(keyword, path, problem)
                if keyword == "patternProperties" and fitted.pop("additionalProperties", True) is not True:
                    self._drop("additionalProperties", path, "it holds beside patternProperties")
            elif problem and not problem.startswith(UNSATISFIABLE):
                raise ValueError(f"{keyword} at {path} = {shown(fitted[keyword])}: {problem}")
            elif is_doubtful or keyword in CONTEXT:
                taken[keyword] = tried

    def _drop(self, keyword: str, path: str, why: str = "", how: str = "is dropped") -> None:
        reason = f": {why}" if why else ""
        if self._strict:
            remedy = f"leave it out, or send strict = false, where it {how}"
            raise ValueError(f"{keyword} at {path} cannot be guaranteed{reason}; {remedy}")
        self._dropped[f"{keyword} at {path} {how}{reason}"] = None


def _put(fitted: JsonObject, keyword: str, value: Json) -> None:
    """Add a keyword. A second `anyOf`, for example from `oneOf`, goes into `allOf`; a second `allOf` is appended."""
    if keyword == "anyOf" and keyword in fitted:
        keyword, value = "allOf", [{"anyOf": value}]
    if keyword == "allOf" and isinstance(value, list):
        value = [*fitted.get(keyword, ()), *value]
    fitted[keyword] = value


def _hollow(keyword: str, value: Json) -> Json:
    """Return a keyword's value with all inner schemas replaced by true."""
    if isinstance(value, dict) and keyword in (*MAPS, *SINGLES):
        return True if keyword in SINGLES else dict.fromkeys(value, True)
    return [True] * len(value) if isinstance(value, list) and keyword in (*LISTS, "items") else value


def _number(keyword: str, value: Json) -> Json:
    """Normalize a number: integers without a fraction, and limits within llguidance's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    value = int(value) if isinstance(value, int) or value.is_integer() else value
    match keyword:
        case "minimum" | "exclusiveMinimum":
            return max(-MAX_NUMBER, value)
        case "maximum" | "exclusiveMaximum":
            return min(MAX_NUMBER, value)
    return value
