"""Formats of tool calls, and an incremental reader of a call.

Text beginning as `{"name": "...", "arguments": {` is a call, whatever follows. So arguments can be streamed while being
written. A call with another beginning is recognized only when complete, and so is a call with parameters between tags,
as Qwen3.5 writes it. The values of such parameters are text, typed by the tool's schema.
"""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from common.base.json_file import Json, JsonObject

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"


class ToolFormat(StrEnum):
    """Format in which a model writes calls."""

    NONE = ""
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, used by Qwen3
    XML = "xml"  # <tool_call><function=...><parameter=...>...</parameter></function></tool_call>, used by Qwen3.5
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} alone, used by Llama 3


class CallShape(NamedTuple):
    """Text around the parts of a call, forced by a grammar."""

    trigger: str  # only before each call; "": plain text begins unlike a call
    before: str  # between trigger and name
    between: str  # between name and arguments
    behind: str
    end: str  # only at the end of each call
    separator: str  # between calls; "": a single call
    is_json: bool = True  # name and arguments are; else the arguments are parameters between tags

    def head(self, name: str) -> str:
        """Return the text between the trigger and the arguments of a call."""
        return f"{self.before}{json.dumps(name, ensure_ascii=False) if self.is_json else name}{self.between}"

    def opening(self, name: str) -> str:
        """Return all text before the arguments of a call."""
        return f"{self.trigger}{self.head(name)}"


SHAPES = {
    ToolFormat.HERMES: CallShape(CALL, '\n{"name": ', ', "arguments": ', "}\n", CALL_END, "\n"),
    ToolFormat.XML: CallShape(CALL, f"\n{FUNCTION}", ">\n", f"{FUNCTION_END}\n", CALL_END, "\n", is_json=False),
    ToolFormat.LLAMA: CallShape("", '{"name": ', ', "parameters": ', "}", "", ""),
}
END_TAGS = {ToolFormat.NONE: "", ToolFormat.HERMES: CALL_END, ToolFormat.XML: CALL_END, ToolFormat.LLAMA: ""}

SPACE = r"[ \n\r\t]{0,64}"
HEAD = re.compile(
    rf'{SPACE}\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rf'"name"{SPACE}:{SPACE}("(?:[^"\\]|\\.){{0,256}}"){SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)',
    re.DOTALL,
)
"""Beginning of a call up to its arguments; of bounded length, because searched again at each token."""
AFTER = re.compile(r"[ \n\r\t]*(\}?)[ \n\r\t;]*")
"""Text between the arguments of a call and the next text."""
IN_STRING = re.compile(r'"|\\')
SIGNS = r'["{}\[\]]'
ESCAPED = re.compile(r"\\.", re.DOTALL)
"""An escape in a JSON string."""
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
XML_HEAD = re.compile(rf"\s*{FUNCTION}([^>\n]{{1,256}})>", re.DOTALL)
XML_PARAMETER = re.compile(
    rf"{PARAMETER}([^>\n]{{1,256}})>(.*?)(?={PARAMETER_END}|{PARAMETER}|{FUNCTION_END}|\Z)", re.DOTALL
)
"""A parameter and its value; models may forget the end tag."""
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip
WORDS = {"True": True, "False": False, "None": None}
"""Values in Python's spelling, which templates show to models."""

MAX_REFERENCES = 8
"""Most references followed from one to the next."""
ToolSchemas = Mapping[str, JsonObject]
"""JSON schemas of the parameters of tools, by tool name."""


def head_of(text: str) -> tuple[str, int] | None:
    """Return the call's name and the start of its arguments if a text begins with a call; otherwise None."""
    head = HEAD.match(text)
    if head is None:
        return None
    try:
        return str(json.loads(head[1])), head.end()
    except ValueError:
        return None


def whole_calls(text: str, max_calls: int) -> list[tuple[str, str]]:
    """Return name and arguments of each call if the text is only calls, perhaps separated by semicolons; else none."""
    calls: list[tuple[str, str]] = []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
            call = _call(value)
        except (ValueError, RecursionError):
            return []
        if call is None or len(calls) == max_calls:
            return []
        calls.append(call)
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _call(value: Json) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


class ArgumentsReader:
    """Streaming reader of the arguments of a call.

    The reader follows braces, brackets and strings only; the client checks the rest. An end tag within a string is
    text. The tag is withheld until the string ends, because a model may forget to end a string. In such a case the tag
    ends the call.
    """

    def __init__(self, end_tag: str) -> None:
        self._end_tag = end_tag
        self._signs = re.compile(f"{SIGNS}|{re.escape(end_tag)}" if end_tag else SIGNS)
        self._held = ""
        self._at = 0  # position in `_held`; earlier text has been followed
        self._string = -1  # start of the current string in `_held`, or 0; -1: none
        self._depth = 0

    def feed(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return certain arguments, and once the arguments have ended, the text behind; None before the end."""
        self._held += text
        end = self._followed()
        if end is not None:
            return self._cut(end)
        sure = self._num_sure()
        if not is_last:
            told, self._held = self._held[:sure], self._held[sure:]
            self._at, self._string = self._at - sure, max(0, self._string - sure) if self._string >= 0 else -1
            return told, None
        is_cut_off = self._string >= 0 and not (self._end_tag and self._held.startswith(self._end_tag, sure))
        return self._cut(len(self._held) if is_cut_off else sure)

    def _followed(self) -> int | None:
        """Follow the withheld text; return the end of the arguments, None before it."""
        while True:
            found = (self._signs if self._string < 0 else IN_STRING).search(self._held, self._at)
            if found is None:
                num_held = num_begun(self._held, self._end_tag) if self._string < 0 else 0
                self._at = max(self._at, len(self._held) - num_held)
                return None
            sign, self._at = found[0], found.end()
            if sign == "\\":
                if self._at == len(self._held):
                    self._at -= 1
                    return None
                self._at += 1
            elif sign == '"':
                self._string = found.start() if self._string < 0 else -1
            elif sign == self._end_tag:
                return found.start()
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    return self._at

    def _num_sure(self) -> int:
        """Return the number of characters certain to be arguments."""
        tag = self._held.find(self._end_tag, self._string) if self._string >= 0 and self._end_tag else -1
        return min(self._at, tag if tag >= 0 else len(self._held) - num_begun(self._held, self._end_tag))

    def _cut(self, end: int) -> tuple[str, str]:
        told, rest, self._held = self._held[:end], self._held[end:], ""
        return told, rest


def num_begun(text: str, tag: str) -> int:
    """Count characters at the end of a text that may begin a tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


class XmlCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str  # JSON


def xml_call(text: str, schemas: ToolSchemas) -> XmlCall | None:
    """Return the call between call tags, None if the text is no call."""
    head = XML_HEAD.match(text)
    if head is None:
        return None
    name = head[1].strip()
    schema = schemas.get(name, {})
    properties = _properties(schema)
    arguments = {
        key.strip(): _typed(_bare(value), types_of(properties.get(key.strip()), schema))
        for key, value in XML_PARAMETER.findall(text)
    }
    return XmlCall(name, json.dumps(arguments, ensure_ascii=False))


def _properties(schema: Json) -> JsonObject:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _bare(value: str) -> str:
    """Return a value without the line break on either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, allowed: set[str]) -> Json:
    """Return the value in one of the allowed types; text where it is allowed alone, or nothing else fits."""
    if allowed == {"string"}:
        return value
    try:
        read = WORDS[value.strip()] if value.strip() in WORDS else json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_fitting = any(isinstance(read, TYPES[name]) and _is_no_flag(read, name) for name in allowed if name in TYPES)
    return read if is_fitting else value


def _is_no_flag(read: Json, name: str) -> bool:
    """Tell true and false from the numbers that they are in Python."""
    return name == "boolean" or not isinstance(read, bool)


def types_of(schema: Json, root: Json) -> set[str]:
    """Return the types that a parameter's schema allows, inside the schema `root`: text, if it says nothing."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return {"string"}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return set().union(*(types_of(each, root) for each in schema[key])) or {"string"}
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)} or {"string"}
    if isinstance(kinds, str):
        return {kinds}
    if "properties" in schema:
        return {"object"}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {name for value in values for name, kinds in TYPES.items() if type(value) in kinds} or {"string"}
    return {"string"}


def resolved(schema: Json, root: Json) -> Json:
    """Follow references to definitions inside `root`, at most `MAX_REFERENCES`."""
    for _ in range(MAX_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        schema = root
        for name in path[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
