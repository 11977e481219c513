"""Rules of a grammar for an answer with tool calls, beside or instead of plain text."""

import json
from typing import Literal, NamedTuple

from common.base.json_file import Json
from router.grammar.dialect import Dialect
from router.text.formats.shapes import SHAPES, CallShape, ToolFormat

Kind = Literal["", "json", "regex", "choice", "grammar", "calls"]
TEXT_INSTEAD = r"""
TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/
"""


class Calls(NamedTuple):
    """Tools and texts allowed in an answer, as JSON in a `GrammarSource`."""

    tool_format: str
    tools: tuple[tuple[str, Json, bool], ...]  # name, JSON schema of the arguments, strictness
    is_one: bool = False  # a single call
    has_text: bool = False  # plain text is allowed beside or instead of calls
    form: tuple[Kind, str, bool] = ("", "", False)  # form of a text instead of calls: kind, text, strict

    @property
    def shape(self) -> CallShape:
        shape = SHAPES[ToolFormat(self.tool_format)]
        return shape._replace(separator=None) if self.is_one else shape


def call_rules(calls: Calls, dialect: Dialect) -> str:
    """Return the rules of an answer, whose arguments of the i-th tool are the grammar `tool{i}`, and a form `form`."""
    shape, written = calls.shape, dialect.written
    is_led = calls.has_text and bool(shape.trigger)  # a text before the calls ends with the trigger
    trigger = "" if is_led or shape.list_begin else shape.trigger
    end = written(shape.behind + shape.end)
    before, between = written(trigger + shape.before), written(shape.between)
    names = [json.dumps(shape.name(name), ensure_ascii=False) for name, _, _ in calls.tools]
    one = " | ".join(f"{before} {name} {between} @tool{i} {end}" for i, name in enumerate(names))
    return f"start: {_start(calls, dialect, is_led=is_led)}\ncall: {one}\n{_texts(calls, dialect)}"


def _start(calls: Calls, dialect: Dialect, *, is_led: bool) -> str:
    """Return the start rule's body: calls, and plain text or another form if allowed."""
    shape, written = calls.shape, dialect.written
    several = "call" if shape.separator is None else f"call ({written(shape.separator)} call)*"
    if shape.list_begin:
        begin = shape.list_begin if is_led else shape.trigger + shape.list_begin
        several = f"{written(begin)} {several} {written(shape.list_end)}"
    if is_led:
        return f"(lead {several})? TEXT" if shape.list_begin or shape.separator is None else "(lead call)* TEXT"
    header = written(shape.header)
    if calls.has_text and header:
        return f"lead? call | lead? {header} TEXT"
    return several + (" | TEXT" if calls.has_text else f" | {header} @form" if calls.form[0] else "")


def _texts(calls: Calls, dialect: Dialect) -> str:
    """Return the rules of plain texts."""
    shape = calls.shape
    if not calls.has_text:
        return ""
    if shape.header:
        begin, end, behind = shape.lead
        text = dialect.text_before(end, "preamble", "TEXT")
        return f"lead: {dialect.written(begin)} preamble {dialect.written(behind)}\n{text}"
    return dialect.text_before(shape.trigger, "lead", "TEXT") if shape.trigger else TEXT_INSTEAD
