"""JSON schemas at the door: what texts are held to, what is dropped with a word, and what is refused with its place."""

import json
import uuid
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import aiohttp
import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from common.grammar.grammars import Grammars
from router.grammar.grammar_main import compiled, dialect_of
from router.grammar.source import NO_GRAMMAR, CompileResult, GrammarSource
from router.requests.tool_choice import TOOL_CHOICE, form_of
from router.text.formats.shapes import ToolFormat
from tests.router.conftest import Cluster
from tests.router.grammar.test_checks import random_text
from tests.support.guided import DEMO_MODEL, is_valid

NUM_TEXTS = 6
MAX_CHARS = 2000
"""Of a text that surely was not cut off."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars.of_model(DEMO_MODEL, 2048, [0])


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def fitted(grammars: Grammars, schema: Any, *, strict: bool) -> CompileResult:
    return compiled(GrammarSource("json", json.dumps(schema), "f", strict=strict), grammars, dialect_of(grammars))


def branch(kind: str, *, required: Sequence[str] = ("kind",), **properties: Any) -> dict[str, Any]:
    """Of a union that is told apart by `kind`."""
    named = {"kind": {"const": kind}} | properties
    return {"type": "object", "properties": named, "required": [*required], "additionalProperties": False}


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Bird(pydantic.BaseModel):
    kind: Literal["bird"] = "bird"
    wings: Annotated[int, pydantic.Field(ge=0, le=9)] = 2


class Fish(pydantic.BaseModel):
    kind: Literal["fish"] = "fish"
    friend: "Bird | Fish | None" = None


class Zoo(pydantic.BaseModel):
    best: Annotated[Bird | Fish, pydantic.Field(discriminator="kind")]
    opened: date
    at: datetime | None = None
    id: uuid.UUID
    price: Decimal
    by_color: dict[Color, bool] = {}
    tag: Annotated[str, pydantic.Field(pattern=r"^[a-z]{2,4}$")]
    keeper: pydantic.SecretStr | None = None


SMALL: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
HELD: dict[str, Any] = {
    "a model of pydantic": Zoo.model_json_schema(),
    "a union by a constant": {"oneOf": [branch("a", x=SMALL), branch("b")]},
    "a union by a constant, referred to": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/definitions/b"}],
        "$defs": {"a": branch("a", x=SMALL)},
        "definitions": {"b": branch("b")},
    },
    "a union whose constant may be left out": {
        "oneOf": [branch("a", required=()), branch("b", required=())],
        "discriminator": {"propertyName": "kind"},
    },
    "a union by what is required": {
        **OBJECT,
        "properties": {"a": SMALL, "b": SMALL, "c": {"type": "null"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "a union of types": {"oneOf": [{"type": "boolean"}, SMALL, {"enum": ["a", "b"]}, {"type": "null"}]},
    "two unions in one": {"oneOf": [{"const": 1}, {"const": 2}], "anyOf": [{"const": 2}, {"const": 3}]},
    "unknown formats": {**OBJECT, "properties": {"a": {"enum": ["x"], "format": "password"}}, "format": "card"},
    "names that are listed": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": SMALL},
    "names by a pattern": {"propertyNames": {"pattern": "^x[0-9]$"}, "type": "object", "additionalProperties": SMALL},
    "short names": {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": SMALL},
    "what is not evaluated": {"type": "object", "properties": {"a": SMALL}, "unevaluatedProperties": False},
    "nothing that is unknown changes anything": {
        "type": "array",
        "items": SMALL,
        "maxItems": 1,
        "uniqueItems": True,
        "if": {"minItems": 1},
        "not": False,
        "contains": {"const": 5},
        "minContains": 0,
    },
    "a property that nothing fits": {**OBJECT, "properties": {"a": {"not": {}}, "b": SMALL}},
    "a tuple with a keyword of old": {"prefixItems": [SMALL], "items": False, "additionalItems": True, "type": "array"},
    "limits beyond what is counted to": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
    "references with every kind of name": {
        **OBJECT,
        "$id": "https://example.com/root.json",
        "properties": {
            "a": {"$ref": "#/$defs/a~1b%25c"},
            "b": {"$ref": "#small"},
            "c": {"$ref": "other.json"},
            "d": {"$ref": "https://example.com/root.json#/$defs/list/prefixItems/0"},
        },
        "required": ["a", "b", "c", "d"],
        "$defs": {
            "a/b%c": SMALL,
            "s": {"$anchor": "small", **SMALL},
            "o": {"$id": "https://example.com/other.json", "const": "o"},
            "list": {"prefixItems": [{"type": "null"}]},
        },
    },
    "what refers to itself": {**OBJECT, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    "null for nothing": {"type": "string", "pattern": "^a{1,3}$", "maxLength": None, "format": None, "enum": None},
}
DROPPED: dict[str, tuple[Any, list[str]]] = {
    "unique items": (
        {**OBJECT, "properties": {"tags": {"type": "array", "items": SMALL, "uniqueItems": True}}},
        ["uniqueItems at #/properties/tags is dropped"],
    ),
    "a union that may overlap": (
        {"$defs": {"n": {"oneOf": [{"type": "number"}, SMALL]}}, "$ref": "#/$defs/n"},
        ["oneOf at #/$defs/n is taken for anyOf: its branches may overlap"],
    ),
    "a pattern that looks around": (
        {**OBJECT, "properties": {"a/b": {"type": "string", "maxLength": 9, "pattern": "^(?=.*[0-9])"}}},
        [
            "pattern at #/properties/a~1b is dropped: look-around, including look-ahead and look-behind, is not "
            "supported, at '(?='"
        ],
    ),
    "what is elsewhere": (
        {"anyOf": [{"$ref": "https://example.com/a.json"}]},
        ["$ref at #/anyOf/0 is dropped: only what is in the schema itself can be referred to"],
    ),
    "several": (
        {**OBJECT, "not": {"required": ["a"]}, "if": {}, "then": {"required": ["b"]}, "dependencies": {"a": ["b"]}},
        ["not at # is dropped", "if at # is dropped", "dependencies at # is dropped"],
    ),
    "how many properties": (
        {"type": "object", "properties": {"a": SMALL, "b": SMALL}, "minProperties": 2, "maxProperties": 3},
        [
            'minProperties at # is dropped: min/maxProperties only supported when all keys listed in "properties" are '
            "required",
            'maxProperties at # is dropped: min/maxProperties only supported when all keys listed in "properties" are '
            "required",
        ],
    ),
}
WRONG = [
    (
        {"properties": {"a": {"required": True}}},
        "required at #/properties/a = true: Expected array for 'required', got true",
    ),
    ({"items": {"type": "float"}}, "type at #/items = 'float': Invalid type: float"),
    ({"anyOf": [{}, 5]}, "#/anyOf/1 = 5: wants a schema, which is an object, true or false"),
    ({"$ref": "#/$defs/missing"}, "$ref at # = '#/$defs/missing': nothing is there"),
    ({"type": "string", "minLength": -1}, "minLength at # = -1: Expected positive integer for 'minLength', got -1"),
    ({"properties": {"a": {"allOf": {}}}}, "allOf at #/properties/a = an object of 0: allOf must be an array"),
    ({"oneOf": []}, "Unsatisfiable schema: anyOf is empty"),
]


@pytest.mark.medium
@pytest.mark.parametrize("schema", HELD.values(), ids=HELD)
def test_texts_are_valid_by_a_schema_of_which_nothing_is_dropped(
    grammars: Grammars, demo_tokenizer: Tokenizer, schema: Any
) -> None:
    grammar, problem, dropped = fitted(grammars, schema, strict=True)
    assert not problem and not dropped
    known = {key: value for key, value in schema.items() if value is not None}
    texts = [random_text(grammar, grammars, demo_tokenizer, seed) for seed in range(NUM_TEXTS)]
    whole = [text for text in texts if len(text) < MAX_CHARS]
    assert whole and all(is_valid(text, known) for text in whole), whole


@pytest.mark.parametrize(("schema", "dropped"), DROPPED.values(), ids=DROPPED)
def test_what_cannot_be_held_is_dropped_and_told_or_refused_where_it_is_strict(
    grammars: Grammars, schema: Any, dropped: list[str]
) -> None:
    lenient = fitted(grammars, schema, strict=False)
    assert not lenient.problem and list(lenient.dropped) == dropped
    strict = fitted(grammars, schema, strict=True)
    what = dropped[0].partition(" is ")[0]
    assert not strict.grammar and strict.problem.startswith(f"{what} cannot be guaranteed"), strict
    assert "strict = false" in strict.problem


@pytest.mark.medium
def test_unions_are_held_as_far_as_they_can_be(grammars: Grammars, demo_tokenizer: Tokenizer) -> None:
    found_kinds = set()
    for seed in range(20):
        grammar = fitted(grammars, HELD["a union whose constant may be left out"], strict=True).grammar
        found_kinds.add(json.loads(random_text(grammar, grammars, demo_tokenizer, seed))["kind"])
    assert found_kinds == {"a", "b"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schema", "reason"), WRONG, ids=[reason[:20] for _, reason in WRONG])
def test_what_is_no_schema_is_told_with_its_place(grammars: Grammars, schema: Any, reason: str, strict: bool) -> None:
    assert fitted(grammars, schema, strict=strict).problem.startswith(reason)


@pytest.mark.medium
def test_large_unions_and_long_chains_are_fitted_in_no_time(grammars: Grammars) -> None:
    chain: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1500)} | {"a1500": SMALL}
    for schema in (
        {"oneOf": [branch(f"kind {i}") for i in range(150)]},
        {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(400)]},
        {"oneOf": [{"required": [f"p{i}"]} for i in range(400)]},
        {"$ref": "#/$defs/a0", "$defs": chain},
    ):
        assert not fitted(grammars, schema, strict=False).problem


def test_a_tool_whose_schema_cannot_be_held_is_named(grammars: Grammars) -> None:
    tags = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema, strict in (("find", OBJECT, True), ("tag", tags, False))
    ]
    values = {"tools": tools, "tool_choice": TOOL_CHOICE.checked("f", "required"), "parallel_tool_calls": True}
    source = form_of(values, ToolFormat.HERMES, NO_GRAMMAR)
    lenient = compiled(source, grammars, dialect_of(grammars))
    assert list(lenient.dropped) == ['"tag": uniqueItems at #/properties/tags is dropped']
    tools[1]["function"]["strict"] = True
    strict = compiled(form_of(values, ToolFormat.HERMES, NO_GRAMMAR), grammars, dialect_of(grammars))
    assert strict.problem.startswith('"tag": uniqueItems at #/properties/tags cannot be guaranteed')


LISTED = {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 2}
WARNING = {
    "code": "keyword_dropped",
    "message": "uniqueItems at # is dropped",
    "param": "response_format.json_schema.schema",
}


def asking(*, strict: bool) -> dict[str, Any]:
    form = {"name": "a", "schema": LISTED, "strict": strict}
    return {"prompt": "the fox", "max_tokens": 5, "response_format": {"type": "json_schema", "json_schema": form}}


@pytest.mark.medium
async def test_a_response_says_what_was_dropped(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as session:
        async with session.post("/v1/completions", json=asking(strict=False)) as response:
            assert response.status == 200 and (await response.json())["warnings"] == [WARNING]
        async with session.post("/v1/completions", json=asking(strict=False) | {"stream": True, "n": 2}) as response:
            lines = (await response.text()).split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        told = [chunk["choices"][0]["index"] for chunk in chunks if chunk.get("warnings") == [WARNING]]
        assert sorted(told) == [0, 1] and sum("warnings" in chunk for chunk in chunks) == 2 < len(chunks)
        async with session.post("/v1/completions", json=asking(strict=True)) as response:
            error = (await response.json())["error"]
        assert response.status == 400 and error["param"] == WARNING["param"]
        assert error["message"].startswith(f"{WARNING['param']}: uniqueItems at # cannot be guaranteed; leave it out")
        async with session.post("/v1/completions", json={"prompt": "the fox", "guided_json": OBJECT}) as response:
            assert "warnings" not in await response.json()


@pytest.mark.medium
async def test_openais_client_keeps_what_was_dropped(cluster: Cluster) -> None:
    extra = asking(strict=False)
    form: dict[str, Any] = {"response_format": extra["response_format"]}
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model="tiny", prompt="the fox", max_tokens=5, extra_body=form)
        assert whole.model_extra == {"warnings": [WARNING]}
