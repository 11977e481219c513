"""Grammar of a call's arguments as Gemma 4 writes them: bare keys, and texts between quotation tags."""

import json
import re

from common.base.json_file import Json, JsonObject
from router.grammar.dialect import Dialect
from router.grammar.xml_parameters import HELD, Parameters
from router.text.formats.shapes import GEMMA_QUOTE
from router.text.formats.typed_values import resolved

BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"]{1,64}")
SCALARS = ("integer", "number", "boolean", "null")
"""Types whose values are written as in JSON."""
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "x-guidance"}
HELD_OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
HELD_OF_LISTS = ANNOTATIONS | {"type", "items", "prefixItems", "minItems", "maxItems"}
MANY = 1 << 30
"""Without effect as a limit."""
COMMA, COLON, OPEN, CLOSE, BEGIN, END = map(json.dumps, ",:{}[]")
ANY = rf"""
any: text | NUMBER | "true" | "false" | "null" | list | map
list: "[" (any ("," any)*)? "]"
map: "{{" (KEY ":" any ("," KEY ":" any)*)? "}}"
KEY: /{BARE_KEY.pattern}/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


def gemma_parameters(name: str, schema: Json, dialect: Dialect) -> Parameters:
    """Return the grammar of a tool's arguments, with value grammars named by `name`.

    Parameters come in the order of the alphabet, as the model's template shows them. Optional parameters may be left
    out, others cannot be added. Parameters of a schema without properties are free.
    """
    return _Writer(name, schema, dialect).parameters()


class _Writer:
    """Writer of the rules of a schema's values."""

    def __init__(self, name: str, root: Json, dialect: Dialect) -> None:
        self._name, self._root, self._dialect = name, root, dialect
        self._quote = dialect.written(GEMMA_QUOTE)
        self._rules: list[str] = []
        self._values: list[JsonObject] = []  # grammars of JSON
        self._references: dict[str, str] = {}  # rules by the path of a definition
        self._dropped: list[str] = []

    def parameters(self) -> Parameters:
        start = self._value(self._root, "")
        end = self._dialect.text_before(GEMMA_QUOTE, "quoted", "TEXT")
        rules = [f"start: {start}", *self._rules, f"text: {self._quote} quoted", end]
        return Parameters([{"lark_grammar": "\n".join(rules) + ANY}, *self._values], self._dropped)

    def _rule(self, body: str) -> str:
        self._rules.append("")  # the name is taken
        return self._define(len(self._rules) - 1, body)

    def _define(self, number: int, body: str) -> str:
        self._rules[number] = f"r{number}: {body}"
        return f"r{number}"

    def _value(self, schema: Json, place: str) -> str:
        """Return the expression of a value; `place` names it in `dropped`."""
        if not isinstance(schema, dict):
            return "any"
        if isinstance(path := schema.get("$ref"), str):
            return self._reference(path, place)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                self._drop(schema, {*ANNOTATIONS, key, "$defs", "definitions"}, place)
                return self._either([self._value(each, place) for each in schema[key]])
        if "const" in schema or isinstance(schema.get("enum"), list):
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either([self._dialect.written(self._literal(each)) for each in choices])
        return self._typed(schema, place)

    def _typed(self, schema: JsonObject, place: str) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._either([self._value(schema | {"type": each}, place) for each in kind])
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, place)
        if kind == "array" or (kind is None and "items" in schema):
            return self._list(schema, place)
        if kind == "string":
            return self._text(schema, place)
        if kind in SCALARS:
            self._values.append({"name": f"{self._name}_{len(self._values)}", "json_schema": schema})
            return f"@{self._values[-1]['name']}"
        self._drop(schema, {*ANNOTATIONS, "$defs", "definitions"}, place)
        return "any"

    def _reference(self, path: str, place: str) -> str:
        if path not in self._references:
            self._rules.append("")
            number = len(self._rules) - 1
            self._references[path] = f"r{number}"
            self._define(number, self._value(resolved({"$ref": path}, self._root), place))
        return self._references[path]

    def _object(self, schema: JsonObject, place: str) -> str:
        self._drop(schema, HELD_OF_OBJECTS, place)
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties") is False:
            return f"{OPEN} {CLOSE}"
        if not properties:
            free = self._rule(f"KEY {COLON} {self._value(schema.get('additionalProperties'), place)}")
            return self._rule(f"{OPEN} ({free} ({COMMA} {free})*)? {CLOSE}")
        required = schema.get("required") or []
        first, others = "", ""  # the last members: with nothing, or with other members, before them
        for key, each in sorted(properties.items(), key=_place_of, reverse=True):
            value = self._value(each, f"{place}.{key}".lstrip("."))
            member = self._rule(f"{self._dialect.written(self._key(key))} {value}")
            if key in required:
                first, others = f"{member} {others}", self._rule(f"{COMMA} {member} {others}")
                continue
            first = self._rule(f"{member} {others} | {first}" if first else f"({member} {others})?")
            others = self._rule(f"({COMMA} {member})? {others}")
        return self._rule(f"{OPEN} {first} {CLOSE}")

    def _list(self, schema: JsonObject, place: str) -> str:
        self._drop(schema, HELD_OF_LISTS, place)
        firsts = [self._value(each, place) for each in schema.get("prefixItems") or []]
        least, most = schema.get("minItems", 0), schema.get("maxItems", MANY)
        rest = schema.get("items")
        if rest is False:
            most = min(most, len(firsts))
        items = ""  # behind the firsts; each item has a comma before, but for the first of the list
        if most > len(firsts):
            item = self._rule(self._value(rest, place))
            before, num_before = (item, 1) if not firsts else ("", 0)
            low, high = max(0, least - len(firsts) - num_before), most - len(firsts) - num_before
            others = _repeated(f"({COMMA} {item})", low, high)
            items = f"{before} {others}"
            items = f"({items})?" if num_before and not least else items
        for number in reversed(range(min(len(firsts), most))):
            comma = COMMA if number else ""
            items = f"{comma} {firsts[number]} {items}"
            items = self._rule(items if number < least else f"({items})?")
        return self._rule(f"{BEGIN} {items} {END}")

    def _text(self, schema: JsonObject, place: str) -> str:
        self._drop(schema, HELD, place)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not least and most is None:
            return "text"
        char = r"(.|\n)" if GEMMA_QUOTE in self._dialect.tokens else "[^<]"
        return f"{self._quote} /{char}{{{least},{'' if most is None else most}}}/ {self._quote}"

    def _drop(self, schema: JsonObject, held: set[str], place: str) -> None:
        prefix = f"{place}." if place else ""
        self._dropped += [f"{prefix}{keyword}" for keyword in sorted(set(schema) - held - ANNOTATIONS)]

    def _either(self, values: list[str]) -> str:
        return f"({' | '.join(values)})"

    def _key(self, key: str) -> str:
        return f"{key}:" if BARE_KEY.fullmatch(key) else f"{GEMMA_QUOTE}{key}{GEMMA_QUOTE}:"

    def _literal(self, value: Json) -> str:
        """Return a value as written in a call."""
        if isinstance(value, str):
            return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
        if isinstance(value, list):
            return f"[{','.join(map(self._literal, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(self._key(key) + self._literal(each) for key, each in value.items())}}}"
        return json.dumps(value)


def _place_of(item: tuple[str, Json]) -> str:
    return item[0].lower()


def _repeated(expression: str, low: int, high: int) -> str:
    """Return the expression so many times."""
    if high == 0:
        return ""
    return f"{expression}{{{low},{'' if high > MANY // 2 else high}}}"
