"""Fields for the form of a text: `response_format`, `structured_outputs`, and vLLM's older `guided_...`."""

import json
from collections.abc import Iterator
from dataclasses import replace

from common.base.errors import RequestError
from common.base.json_file import Json
from router.base.json_fields import Field, Table, Values, given, object_of, without
from router.base.json_rules import BOOLEAN, Rule, is_text, one_of, only, string, wrong
from router.grammar.call_rules import Kind
from router.grammar.source import NO_GRAMMAR, WHITESPACE, GrammarSource, nesting

MAX_SOURCE_CHARS = 65_536
MAX_NESTING = 64
MAX_CHOICES = 4096
MAX_PATTERN_CHARS = 256
ONE_ONLY = "one form at a time: response_format, structured_outputs or guided_..., and one of its fields"


def _schema(name: str, value: Json) -> str:
    if isinstance(value, str) and len(value) > MAX_SOURCE_CHARS:
        raise wrong(name, value, SCHEMA.wants)
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict) or nesting(schema, MAX_NESTING) > MAX_NESTING:
        raise wrong(name, value, SCHEMA.wants)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise wrong(name, value, f"{SCHEMA.wants}, of finite numbers") from None
    if len(text) > MAX_SOURCE_CHARS or not is_text(text):
        raise wrong(name, value, f"{SCHEMA.wants}, of valid Unicode")
    return text


SCHEMA_TEXT = {"type": "string", "maxLength": MAX_SOURCE_CHARS, "pattern": r"^[ \t\n\r]*\{"}
SCHEMA = Rule(
    f"a JSON schema as an object or its text, at most {MAX_SOURCE_CHARS} characters and {MAX_NESTING} levels deep",
    {"anyOf": [{"type": "object"}, SCHEMA_TEXT | {"contentMediaType": "application/json"}]},
    _schema,
)
"""Rule for a JSON schema; gives text."""


def _choices(name: str, value: Json) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise wrong(name, value, CHOICES.wants)
    if not all(is_text(each) and each for each in value) or sum(map(len, value)) > MAX_SOURCE_CHARS:
        raise wrong(name, value, CHOICES.wants)
    return json.dumps(value, ensure_ascii=False)


CHOICES = Rule(
    f"a list of 1 to {MAX_CHOICES} strings, none of them empty, together at most {MAX_SOURCE_CHARS} characters",
    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    _choices,
)
"""Rule for a list of strings; gives JSON."""
STRICT_ABOUT = "true: a keyword that cannot be guaranteed is refused; else it is dropped, and `warnings` says so"
SPACES_ABOUT = "a regular expression, between the parts of JSON; without it at most two spaces, or a line break and 20"
SOURCE = string(MAX_SOURCE_CHARS, min_chars=1)
PATTERN = string(MAX_PATTERN_CHARS)
JSON_SCHEMA = Table(
    Field("name", string(64), None, "taken, without effect, as the next"),
    Field("description", string()),
    Field("schema", SCHEMA, None, "with `json_schema`: by which the text is valid, unless `max_tokens` ends it"),
    Field("strict", BOOLEAN, None, STRICT_ABOUT),
)
UNNESTED = "the same without `json_schema` around it"
HAS_SCHEMA = given("schema", SCHEMA.schema)
"""JSON schema of an object with a field `schema`."""
RESPONSE_FORMAT = Table(
    Field("type", one_of("text", "json_object", "json_schema"), None, "the text is JSON"),
    Field("json_schema", object_of(JSON_SCHEMA)),
    *(Field(name, field.rule, None, UNNESTED) for name, field in JSON_SCHEMA.fields.items()),
    relations=[
        {
            "anyOf": [
                given("type", {"enum": ["text", "json_object"]}),
                {"allOf": [given("json_schema", {"type": "object"} | HAS_SCHEMA), without("schema")]},
                {"allOf": [without("json_schema"), HAS_SCHEMA]},
            ]
        }
    ],
)
STRUCTURED_OUTPUTS = Table(
    Field("json", SCHEMA, None, "the text is JSON by it; one of these at a time"),
    Field("regex", SOURCE, None, "the whole text matches it; in Rust's syntax, without looking around"),
    Field("choice", CHOICES, None, "the text is one of these"),
    Field("grammar", SOURCE, None, "the text follows it; in llguidance's variant of Lark, or in GBNF"),
    Field("json_object", BOOLEAN, False, "the text is a JSON object"),
    Field(
        "whitespace_pattern",
        PATTERN,
        None,
        SPACES_ABOUT,
    ),
    Field("disable_any_whitespace", BOOLEAN, False, "nothing is between them"),
    Field("disable_additional_properties", only(False, remedy="say additionalProperties: false in the schema")),
    Field("disable_fallback", only(False, True)),
    Field("structural_tag", only()),
)
STRUCTURED_FIELDS = (
    Field("response_format", object_of(RESPONSE_FORMAT, required="type")),
    Field("structured_outputs", object_of(STRUCTURED_OUTPUTS)),
    Field("guided_json", SCHEMA, None, "older name of `structured_outputs.json`"),
    Field("guided_regex", SOURCE, None, "older name of `structured_outputs.regex`"),
    Field("guided_choice", CHOICES, None, "older name of `structured_outputs.choice`"),
    Field("guided_grammar", SOURCE, None, "older name of `structured_outputs.grammar`"),
    Field("guided_whitespace_pattern", PATTERN, None, "older name of `structured_outputs.whitespace_pattern`"),
    Field("guided_decoding_backend", only("auto", "guidance", "llguidance", remedy="it is llguidance here")),
)
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")


def grammar_source(values: Values) -> GrammarSource:
    """Return the requested form, or `NO_GRAMMAR`; raise RequestError for several forms."""
    sources = list(_sources(values))
    if len(sources) > 1:
        raise RequestError(f"{sources[0].field} and {sources[1].field}: {ONE_ONLY}", param=sources[1].field)
    whitespace, field = _whitespace(values)
    if field and (not sources or sources[0].kind != "json"):
        raise RequestError(f"{field}: only with JSON that is asked for; leave it out", param=field)
    return replace(sources[0], whitespace=whitespace) if sources else NO_GRAMMAR


def _sources(values: Values) -> Iterator[GrammarSource]:
    form = values["response_format"] or {"type": "text"}
    match form["type"]:
        case None:
            field = "response_format.type"
            raise RequestError(f"{field} is missing: say text, json_object or json_schema", param=field)
        case "json_object":
            yield _any_object("response_format")
        case "json_schema":
            nested = form.get("json_schema")
            if nested is not None and form.get("schema") is not None:
                raise wrong("response_format.schema", "a schema", "none beside json_schema; leave one of them out")
            said = form if nested is None else nested
            schema = said.get("schema")
            field = "response_format.schema" if nested is None and schema else "response_format.json_schema.schema"
            if schema is None:
                raise RequestError(f"{field} is missing: send a JSON schema", param=field, code="missing_field")
            yield GrammarSource("json", schema, field, strict=bool(said.get("strict")))
    outputs = values["structured_outputs"] or {}
    for kind in KINDS:
        if outputs.get(kind) is not None:
            yield GrammarSource(kind, outputs[kind], f"structured_outputs.{kind}")
        if values[f"guided_{kind}"] is not None:
            yield GrammarSource(kind, values[f"guided_{kind}"], f"guided_{kind}")
    if outputs.get("json_object"):
        yield _any_object("structured_outputs.json_object")


def _any_object(field: str) -> GrammarSource:
    return GrammarSource("json", '{"type": "object"}', field)


def _whitespace(values: Values) -> tuple[str, str]:
    """Return the pattern of whitespace between parts of JSON, and the name of the deciding field."""
    outputs = values["structured_outputs"] or {}
    if outputs.get("disable_any_whitespace"):
        return "", "structured_outputs.disable_any_whitespace"
    for field, pattern in (
        ("structured_outputs.whitespace_pattern", outputs.get("whitespace_pattern")),
        ("guided_whitespace_pattern", values["guided_whitespace_pattern"]),
    ):
        if pattern is not None:
            return pattern, field
    return WHITESPACE, ""
