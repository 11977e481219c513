"""What a client says of the form of its text, and the grammar that llguidance makes of it."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.chat_answer import CALL, CALL_END, THINK, THINK_END, Thoughts

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


NO_GRAMMAR = GrammarSource()


@dataclass(frozen=True, slots=True)
class Calls:
    """How tools are called, as JSON in a `GrammarSource`."""

    trigger: str  # stands before each call and nowhere else; "": a text beside calls does not begin as they do
    before: str  # the name, behind the trigger
    between: str  # name and arguments
    behind: str
    end: str  # of a call, and stands nowhere else
    separator: str  # between calls; "": only one
    tools: tuple[tuple[str, Any], ...]  # name, and JSON schema of the arguments
    has_text: bool = False  # beside calls, or in their place
    form: tuple[Kind, str] = ("", "")  # of a text in place of calls


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

    def text_before(self, mark: str, rule: str, text: str) -> str:
        """Two rules: of a text that ends with the mark, and of one that has none."""
        anything = r"/(.|\n)*/"
        ends = f"{rule}: {text} {mark}" if mark in self.tokens else f"{rule}[suffix={json.dumps(mark)}]: {anything}"
        return f"{ends}\n{text}: {anything} & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/\n"


def grammar_of(source: GrammarSource, dialect: Dialect) -> str:
    """As llguidance takes it."""
    grammars = _GRAMMARS[source.kind](source, dialect)
    if source.thoughts:
        begin = "thoughts gap" if source.thoughts == "have begun" else f"({dialect.mark(THINK)} thoughts gap)?"
        rules = dialect.text_before(THINK_END, "thoughts", "THOUGHT") + GAP
        start = {"lark_grammar": f"start: {begin} @text\n{rules}"}
        grammars = [start, {**grammars[0], "name": "text"}, *grammars[1:]]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _json(source: GrammarSource, _: Dialect) -> list[dict[str, Any]]:
    return [{"json_schema": _with_whitespace(json.loads(source.text), source.whitespace)}]


def _regex(source: GrammarSource, _: Dialect) -> list[dict[str, Any]]:
    return [{"lark_grammar": f"start: /{_escaped(source.text)}/"}]


def _choice(source: GrammarSource, _: Dialect) -> list[dict[str, Any]]:
    return [{"lark_grammar": "start: " + " | ".join(map(json.dumps, json.loads(source.text)))}]


def _grammar(source: GrammarSource, dialect: Dialect) -> list[dict[str, Any]]:
    return [{"lark_grammar": dialect.to_lark(source.text)}]


def _calls(source: GrammarSource, dialect: Dialect) -> list[dict[str, Any]]:
    calls = Calls(**json.loads(source.text))
    kind, text = calls.form
    forms = _GRAMMARS[kind](GrammarSource(kind, text, whitespace=source.whitespace), dialect) if kind else []
    trigger = "" if calls.has_text else dialect.mark(calls.trigger)
    end = f"{json.dumps(calls.behind)} {dialect.mark(calls.end)}"
    begins = [
        f"{trigger} {json.dumps(f'{calls.before}{json.dumps(name, ensure_ascii=False)}{calls.between}')}"
        for name, _ in calls.tools
    ]
    one = " | ".join(f"{begin} @tool{i} {end}" for i, begin in enumerate(begins))
    arguments = [
        {"name": f"tool{i}", "json_schema": _with_whitespace(schema, source.whitespace)}
        for i, (_, schema) in enumerate(calls.tools)
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


_GRAMMARS: dict[str, Callable[[GrammarSource, Dialect], list[dict[str, Any]]]] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "calls": _calls
}  # fmt: skip


def _with_whitespace(schema: Any, whitespace: str) -> Any:
    """The schema with how JSON may be spaced, unless it says that itself."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    spacing = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    said = schema.get("x-guidance")
    return schema | {"x-guidance": spacing | said if isinstance(said, dict) else spacing}


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
