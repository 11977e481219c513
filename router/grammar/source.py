"""A client's request for a form of text, and the resulting llguidance grammar."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from common.base.json_file import Json, JsonObject
from router.grammar.schema_fit import fit
from router.grammar.schema_unions import Refusal
from router.grammar.xml_parameters import xml_parameters
from router.text.chat_answer import THINK, THINK_END, Thoughts
from router.text.tool_calls import CALL, CALL_END, CallShape

Kind = Literal["", "json", "regex", "choice", "grammar", "calls"]

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,20}"
"""Allowed between parts of JSON by default; bounded, because a model might write white space forever."""
GAP = r"gap: /[ \n\r\t]{0,8}/" + "\n"
TEXT_INSTEAD = r"""
TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/
"""
MARKS = (THINK, THINK_END, CALL, CALL_END)
"""Tags used in grammars, each a single token of many models. llguidance treats such a token as no text, allowed only
where named."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A requested form: `text` is a schema, a regular expression, a list, a grammar, or JSON of `Calls`."""

    kind: Kind = ""  # "": no grammar
    text: str = ""
    field: str = ""  # field of the request, for errors
    whitespace: str = WHITESPACE  # regular expression for white space in JSON, "" for none
    thoughts: Thoughts = ""  # thoughts before the constrained text
    max_thought_tokens: int | None = None  # of thoughts; None: no limit
    strict: bool = False  # no keyword of a schema is dropped


NO_GRAMMAR = GrammarSource()
ANYTHING = GrammarSource("regex", r"(.|\n)*", "thinking_token_budget")
"""For a text with limited thoughts, but no other form."""


class Calls(NamedTuple):
    """Format of tool calls, as JSON in a `GrammarSource`."""

    shape: CallShape
    tools: tuple[tuple[str, Json, bool], ...]  # name, JSON schema of the arguments, strictness
    has_text: bool = False  # plain text is allowed beside or instead of calls
    form: tuple[Kind, str, bool] = ("", "", False)  # form of a text instead of calls: kind, text, strict


@dataclass(frozen=True, slots=True)
class Dialect:
    """Properties of the model that grammars depend on.

    Args:
        to_lark: converts a grammar from GBNF to Lark.
        tokens: marks of `MARKS` that are tokens of the model.
    """

    to_lark: Callable[[str], str]
    tokens: Collection[str] = ()

    def mark(self, mark: str) -> str:
        """Return a mark as written in a rule: a token, a quoted string, or "" for no mark."""
        return mark if mark in self.tokens else json.dumps(mark) if mark else ""

    def text_before(self, mark: str, rule: str, text: str, max_tokens: int | None = None) -> str:
        """Return two rules: `rule` for a text ended by the mark, `text` for a text without the mark.

        Args:
            max_tokens: limit of the text before the mark.

        Raises:
            ValueError: for a limit if the mark is no token, because only a token can interrupt a text.
        """
        anything = r"/(.|\n)*/"
        none = f"{text}: {anything} & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/\n"
        if max_tokens is not None:
            if mark not in self.tokens:
                raise ValueError(f"thinking_token_budget: {mark} is no token of this model; leave the budget out")
            return f"{rule}: {rule}_before {mark}\n{rule}_before[max_tokens={max_tokens}]: {text}\n{none}"
        ends = f"{rule}: {text} {mark}" if mark in self.tokens else f"{rule}[suffix={json.dumps(mark)}]: {anything}"
        return f"{ends}\n{none}"


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
    if source.thoughts:
        begin = "thoughts gap" if source.thoughts == "have begun" else f"({dialect.mark(THINK)} thoughts gap)?"
        rules = dialect.text_before(THINK_END, "thoughts", "THOUGHT", source.max_thought_tokens) + GAP
        start = {"lark_grammar": f"start: {begin} @text\n{rules}"}
        grammars = [start, {**grammars[0], "name": "text"}, *grammars[1:]]
    return Grammar(json.dumps({"grammars": grammars}, ensure_ascii=False), tuple(schemas.dropped))


def _json(source: GrammarSource, _: Dialect, schemas: _Schemas) -> list[JsonObject]:
    return [{"json_schema": schemas.fitted(json.loads(source.text), source)}]


def _regex(source: GrammarSource, _: Dialect, __: _Schemas) -> list[JsonObject]:
    return [{"lark_grammar": f"start: /{_escaped(source.text)}/"}]


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
    written, *others = json.loads(source.text)
    calls = Calls(CallShape(*written), *others)
    shape, (kind, text, strict) = calls.shape, calls.form
    form = replace(source, kind=kind, text=text, strict=strict)
    forms = _GRAMMARS[kind](form, dialect, schemas) if kind else []
    trigger = "" if calls.has_text else dialect.mark(shape.trigger)
    end = f"{json.dumps(shape.behind)} {dialect.mark(shape.end)}"
    begins = [f"{trigger} {json.dumps(shape.head(name))}" for name, _, _ in calls.tools]
    one = " | ".join(f"{begin} @tool{i} {end}" for i, begin in enumerate(begins))
    arguments: list[JsonObject] = []
    for i, (name, schema, is_strict) in enumerate(calls.tools):
        fitted = schemas.fitted(schema, replace(source, strict=is_strict), name)
        if shape.is_json:
            arguments.append({"name": f"tool{i}", "json_schema": fitted})
            continue
        (first, *values), dropped = xml_parameters(f"tool{i}", fitted)
        if dropped and is_strict:
            raise ValueError(f"{name}: {', '.join(dropped)}: text of a call cannot be held to that with this model")
        schemas.dropped += [f"{name}: {each}" for each in dropped]
        arguments += [{**first, "name": f"tool{i}"}, *values]
    lark = f"start: {_start(calls)}\ncall: {one}\n"
    if calls.has_text:
        lark += dialect.text_before(shape.trigger, "lead", "TEXT") if shape.trigger else TEXT_INSTEAD
    return [{"lark_grammar": lark}, *arguments, *({**form, "name": "form"} for form in forms)]


def _start(calls: Calls) -> str:
    """Return the start rule's body: calls, and plain text or another form if allowed."""
    separator = calls.shape.separator
    if calls.has_text and calls.shape.trigger:
        return "(lead call)* TEXT" if separator else "(lead call)? TEXT"
    some = f"call ({json.dumps(separator)} call)*" if separator else "call"
    return some + (" | TEXT" if calls.has_text else " | @form" if calls.form[0] else "")


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


def _escaped(regex: str) -> str:
    """Escape a regular expression for use between slashes; existing escapes stay."""
    pieces: list[str] = []
    characters = iter(regex)
    for character in characters:
        if character == "\\":
            pieces.append(character + next(characters, ""))
        else:
            pieces.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character))
    return "".join(pieces)


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
