"""What a client says of the form of its text, and the grammar that llguidance makes of it."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from router.grammar.schema_fit import Refusal, fit
from router.text.chat_answer import THINK, THINK_END, Thoughts
from router.text.tool_calls import CALL, CALL_END

Kind = Literal["", "json", "regex", "choice", "grammar", "calls"]

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,20}"
"""Between the parts of JSON, where a client says nothing else: a model that finds no end would write nothing more."""
GAP = r"gap: /[ \n\r\t]{0,8}/" + "\n"
TEXT_INSTEAD = r"""
TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/
"""
MARKS = (THINK, THINK_END, CALL, CALL_END)
"""What stands in grammars that are made here, and is one token of many models: to llguidance such a token is no text,
and is there where it is named only."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """One of the ways to say it; `text` is a schema, a regular expression, a list or a grammar, or what is called."""

    kind: Kind = ""  # none
    text: str = ""
    field: str = ""  # of the request
    whitespace: str = WHITESPACE  # in JSON: a regular expression, "" for none
    thoughts: Thoughts = ""  # before the text that has the form
    max_thought_tokens: int | None = None  # of them; None: no limit
    strict: bool = False  # of a schema: nothing of it is dropped


NO_GRAMMAR = GrammarSource()
ANYTHING = GrammarSource("regex", r"(.|\n)*", "thinking_token_budget")
"""For a text of which only the thoughts are limited."""


@dataclass(frozen=True, slots=True)
class Calls:
    """How tools are called, as JSON in a `GrammarSource`."""

    trigger: str  # stands before each call and nowhere else; "": a text beside calls does not begin as they do
    before: str  # the name, behind the trigger
    between: str  # name and arguments
    behind: str
    end: str  # of a call, and stands nowhere else
    separator: str  # between calls; "": only one
    tools: tuple[tuple[str, Any, bool], ...]  # name, JSON schema of the arguments, and whether it is strict
    has_text: bool = False  # beside calls, or in their place
    form: tuple[Kind, str, bool] = ("", "", False)  # of a text in place of calls: kind, text, strict


@dataclass(frozen=True, slots=True)
class Dialect:
    """What grammars are made for.

    Args:
        to_lark: makes a Lark grammar of one in GBNF.
        tokens: those of `MARKS` that are tokens of the model.
    """

    to_lark: Callable[[str], str]
    tokens: Collection[str] = ()

    def mark(self, mark: str) -> str:
        """In a rule, if it is not empty."""
        return mark if mark in self.tokens else json.dumps(mark) if mark else ""

    def text_before(self, mark: str, rule: str, text: str, max_tokens: int | None = None) -> str:
        """Make two rules, of a text that ends with the mark, and of one that has none, of at most so many tokens.

        Raises ValueError for a limit where the mark is no token: nothing else can end a text amid it.
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
    """A grammar as llguidance takes it, and in words what it does not hold texts to."""

    text: str
    dropped: tuple[str, ...] = ()


class Found(NamedTuple):
    """A grammar that compiles, or why it does not; both are "" where nobody had the time to find out."""

    grammar: str = ""
    problem: str = ""
    dropped: Sequence[str] = ()


class _Schemas:
    """The JSON schemas of one grammar, fitted."""

    def __init__(self, refusal: Refusal | None) -> None:
        self._refusal = refusal
        self.dropped: list[str] = []

    def fitted(self, schema: Any, source: GrammarSource, name: str = "") -> Any:
        """Fit a schema, of a tool that is named; raises ValueError."""
        whose = f"{json.dumps(name, ensure_ascii=False)}: " if name else ""
        try:
            fitted = fit(schema, strict=source.strict, refusal=self._refusal)
        except ValueError as error:
            raise ValueError(f"{whose}{error}") from None
        self.dropped += [f"{whose}{each}" for each in fitted.dropped]
        return _with_whitespace(fitted.schema, source.whitespace)


def grammar_of(source: GrammarSource, dialect: Dialect, refusal: Refusal | None = None) -> Grammar:
    """Write it as llguidance takes it; raises ValueError. What `refusal` is for see `schema_fit.fit`."""
    schemas = _Schemas(refusal)
    grammars = _GRAMMARS[source.kind](source, dialect, schemas)
    if source.thoughts:
        begin = "thoughts gap" if source.thoughts == "have begun" else f"({dialect.mark(THINK)} thoughts gap)?"
        rules = dialect.text_before(THINK_END, "thoughts", "THOUGHT", source.max_thought_tokens) + GAP
        start = {"lark_grammar": f"start: {begin} @text\n{rules}"}
        grammars = [start, {**grammars[0], "name": "text"}, *grammars[1:]]
    return Grammar(json.dumps({"grammars": grammars}, ensure_ascii=False), tuple(schemas.dropped))


def _json(source: GrammarSource, _: Dialect, schemas: _Schemas) -> list[dict[str, Any]]:
    return [{"json_schema": schemas.fitted(json.loads(source.text), source)}]


def _regex(source: GrammarSource, _: Dialect, __: _Schemas) -> list[dict[str, Any]]:
    return [{"lark_grammar": f"start: /{_escaped(source.text)}/"}]


def _choice(source: GrammarSource, _: Dialect, __: _Schemas) -> list[dict[str, Any]]:
    """Make one terminal of all: as a rule each would take a place in the parser's rows, which have 2,000."""
    return [{"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(source.text)))}]


def _grammar(source: GrammarSource, dialect: Dialect, _: _Schemas) -> list[dict[str, Any]]:
    try:
        return [{"lark_grammar": dialect.to_lark(source.text)}]
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except Exception as error:  # of no class in particular
        found = "it ends within an escape sequence" if isinstance(error, IndexError) else error
        raise ValueError(f"read as GBNF, because it has no rule `start:` as Lark has: {found}") from error


def _calls(source: GrammarSource, dialect: Dialect, schemas: _Schemas) -> list[dict[str, Any]]:
    calls = Calls(**json.loads(source.text))
    kind, text, strict = calls.form
    form = replace(source, kind=kind, text=text, strict=strict)
    forms = _GRAMMARS[kind](form, dialect, schemas) if kind else []
    trigger = "" if calls.has_text else dialect.mark(calls.trigger)
    end = f"{json.dumps(calls.behind)} {dialect.mark(calls.end)}"
    begins = [
        f"{trigger} {json.dumps(f'{calls.before}{json.dumps(name, ensure_ascii=False)}{calls.between}')}"
        for name, _, _ in calls.tools
    ]
    one = " | ".join(f"{begin} @tool{i} {end}" for i, begin in enumerate(begins))
    arguments = [
        {"name": f"tool{i}", "json_schema": schemas.fitted(schema, replace(source, strict=is_strict), name)}
        for i, (name, schema, is_strict) in enumerate(calls.tools)
    ]
    lark = f"start: {_start(calls)}\ncall: {one}\n"
    if calls.has_text:
        lark += dialect.text_before(calls.trigger, "lead", "TEXT") if calls.trigger else TEXT_INSTEAD
    return [{"lark_grammar": lark}, *arguments, *({**form, "name": "form"} for form in forms)]


def _start(calls: Calls) -> str:
    """Which calls, and what else."""
    if calls.has_text and calls.trigger:
        return "(lead call)* TEXT" if calls.separator else "(lead call)? TEXT"
    some = f"call ({json.dumps(calls.separator)} call)*" if calls.separator else "call"
    return some + (" | TEXT" if calls.has_text else " | @form" if calls.form[0] else "")


_GRAMMARS: dict[str, Callable[[GrammarSource, Dialect, _Schemas], list[dict[str, Any]]]] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "calls": _calls
}  # fmt: skip


def _with_whitespace(schema: Any, whitespace: str) -> Any:
    """Say in the schema how JSON may be spaced."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}}


def _escaped(regex: str) -> str:
    """Between slashes; an escaped character stays as it is."""
    pieces: list[str] = []
    characters = iter(regex)
    for character in characters:
        if character == "\\":
            pieces.append(character + next(characters, ""))
        else:
            pieces.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character))
    return "".join(pieces)


def calls_source(calls: Calls, whitespace: str = WHITESPACE) -> GrammarSource:
    """For a chat whose calls are held to a form."""
    parts = {name: getattr(calls, name) for name in Calls.__dataclass_fields__}
    return GrammarSource("calls", json.dumps(parts, ensure_ascii=False), "tools", whitespace)


def nesting(value: Any, most: int) -> int:
    """How deep lists and objects stand in one another, at most `most` + 1."""
    level: Sequence[Any] = [value]
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
