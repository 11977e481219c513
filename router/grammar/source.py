"""A client's request for a form of text, and the resulting llguidance grammar."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.grammar.call_rules import Calls, Kind, call_rules
from router.grammar.dialect import Dialect, escaped
from router.grammar.gemma_parameters import gemma_parameters
from router.grammar.schema_fit import fit
from router.grammar.schema_unions import Refusal
from router.grammar.xml_parameters import Parameters, xml_parameters
from router.text.formats.shapes import THINK_TAGS, Thoughts, ThoughtTags

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,20}"
"""Allowed between parts of JSON by default; bounded, because a model might write white space forever."""
GAP = r"gap: /[ \n\r\t]{0,8}/" + "\n"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A requested form: `text` is a schema, a regular expression, a list, a grammar, or JSON of `Calls`."""

    kind: Kind = ""  # "": no grammar
    text: str = ""
    field: str = ""  # field of the request, for errors
    whitespace: str = WHITESPACE  # regular expression for white space in JSON, "" for none
    thoughts: Thoughts = ""  # thoughts before the constrained text
    tags: ThoughtTags = THINK_TAGS  # around the thoughts
    header: str = ""  # text between thoughts and the constrained text
    max_thought_tokens: int | None = None  # of thoughts; None: no limit
    strict: bool = False  # no keyword of a schema is dropped


NO_GRAMMAR = GrammarSource()
ANYTHING = GrammarSource("regex", r"(.|\n)*", "thinking_token_budget")
"""For a text with limited thoughts, but no other form."""


class Grammar(NamedTuple):
    """A grammar for llguidance, and descriptions of keywords not enforced."""

    text: str
    dropped: tuple[str, ...] = ()


class CompileResult(NamedTuple):
    """A compiled grammar, or the problem with it; both are "" if compilation did not finish."""

    grammar: str = ""
    problem: str = ""
    dropped: tuple[str, ...] = ()


class _Schemas:
    """Fitted JSON schemas of a grammar."""

    def __init__(self, refusal: Refusal, *, is_refused: bool) -> None:
        self._refusal, self._is_refused = refusal, is_refused
        self.dropped: list[str] = []

    def fitted(self, schema: Json, source: GrammarSource, name: str = "") -> Json:
        """Fit a schema, of a tool if `name` is given; raises ValueError."""
        whose = f"{json.dumps(name, ensure_ascii=False)}: " if name else ""
        try:
            fitted = fit(schema, self._refusal, strict=source.strict, is_refused=self._is_refused)
        except ValueError as error:
            raise ValueError(f"{whose}{error}") from None
        self.dropped += [f"{whose}{each}" for each in fitted.dropped]
        return _with_whitespace(fitted.schema, source.whitespace)


def grammar_of(source: GrammarSource, dialect: Dialect, refusal: Refusal, *, is_refused: bool = False) -> Grammar:
    """Write the grammar for llguidance; raises ValueError. For `is_refused` see `schema_fit.fit`."""
    schemas = _Schemas(refusal, is_refused=is_refused)
    grammars = _GRAMMARS[source.kind](source, dialect, schemas)
    if source.thoughts or source.header:
        grammars = [_behind_thoughts(source, dialect), {**grammars[0], "name": "text"}, *grammars[1:]]
    return Grammar(json.dumps({"grammars": grammars}, ensure_ascii=False), tuple(schemas.dropped))


def _behind_thoughts(source: GrammarSource, dialect: Dialect) -> JsonObject:
    """Return the grammar of an answer whose constrained text, named `text`, follows thoughts or a header."""
    header, tags = dialect.written(source.header), source.tags
    if not source.thoughts:
        return {"lark_grammar": f"start: {header} @text"}
    behind = dialect.written(tags.behind) or "gap"
    is_begun = source.thoughts == "have begun"
    begin = f"thoughts {behind}" if is_begun else f"({dialect.written(tags.begin)} thoughts {behind})?"
    rules = dialect.text_before(tags.end, "thoughts", "THOUGHT", source.max_thought_tokens)
    return {"lark_grammar": f"start: {begin} {header} @text\n{rules}{'' if tags.behind else GAP}"}


def _json(source: GrammarSource, _: Dialect, schemas: _Schemas) -> list[JsonObject]:
    return [{"json_schema": schemas.fitted(json.loads(source.text), source)}]


def _regex(source: GrammarSource, _: Dialect, __: _Schemas) -> list[JsonObject]:
    return [{"lark_grammar": f"start: /{escaped(source.text)}/"}]


def _choice(source: GrammarSource, _: Dialect, __: _Schemas) -> list[JsonObject]:
    """Make a single terminal of all choices, because rules would fill the parser's rows of at most 2,000 items."""
    return [{"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(source.text)))}]


def _grammar(source: GrammarSource, dialect: Dialect, _: _Schemas) -> list[JsonObject]:
    try:
        return [{"lark_grammar": dialect.to_lark(source.text)}]
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except Exception as error:  # the library raises various classes
        found = "it ends within an escape sequence" if isinstance(error, IndexError) else error
        raise ValueError(f"read as GBNF, because it has no rule `start:` as Lark has: {found}") from error


def _calls(source: GrammarSource, dialect: Dialect, schemas: _Schemas) -> list[JsonObject]:
    calls = Calls(*json.loads(source.text))
    kind, text, strict = calls.form
    form = replace(source, kind=kind, text=text, strict=strict)
    forms = _GRAMMARS[kind](form, dialect, schemas) if kind else []
    arguments: list[JsonObject] = []
    for i, (name, schema, is_strict) in enumerate(calls.tools):
        fitted = schemas.fitted(schema, replace(source, strict=is_strict), name)
        if calls.shape.arguments == "json":
            arguments.append({"name": f"tool{i}", "json_schema": fitted})
            continue
        (first, *values), dropped = _PARAMETERS[calls.shape.arguments](f"tool{i}", fitted, dialect)
        if dropped and is_strict:
            raise ValueError(f"{name}: {', '.join(dropped)}: text of a call cannot be held to that with this model")
        schemas.dropped += [f"{name}: {each}" for each in dropped]
        arguments += [{**first, "name": f"tool{i}"}, *values]
    return [{"lark_grammar": call_rules(calls, dialect)}, *arguments, *({**each, "name": "form"} for each in forms)]


_PARAMETERS: dict[str, Callable[[str, Json, Dialect], Parameters]] = {"xml": xml_parameters, "gemma": gemma_parameters}
"""Writers of arguments other than JSON, by `CallShape.arguments`."""
_GRAMMARS: dict[str, Callable[[GrammarSource, Dialect, _Schemas], list[JsonObject]]] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "calls": _calls
}  # fmt: skip


def _with_whitespace(schema: Json, whitespace: str) -> Json:
    """Add the allowed white space to the schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}}


def calls_source(calls: Calls, whitespace: str = WHITESPACE) -> GrammarSource:
    """Return the source for a chat with constrained calls."""
    return GrammarSource("calls", json.dumps(calls, ensure_ascii=False), "tools", whitespace)


def nesting(value: Json, most: int) -> int:
    """Return the depth of nested lists and objects, at most `most` + 1."""
    level: Sequence[Json] = [value]
    for depth in range(most + 1):
        level = [
            each
            for parent in level
            if isinstance(parent, dict | list)
            for each in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return depth
    return most + 1
