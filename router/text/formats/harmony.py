"""Answers of gpt-oss: messages in the harmony format, each with a channel, and perhaps a recipient, in its header.

A header ends with `<|message|>`, a message with a tag. Messages of the channel `analysis` are thoughts, messages to a
recipient are calls, and all others are content. A tag inside a string of a call's JSON is text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum

from common.base.json_file import Json, JsonObject
from router.text.formats.history import with_results
from router.text.formats.json_arguments import ArgumentsReader
from router.text.formats.parts import CallWriter, HeldText, Part, num_begun
from router.text.formats.shapes import (
    CHANNEL,
    CONSTRAIN,
    HARMONY_CALL,
    MESSAGE,
    MESSAGE_END,
    NEXT_MESSAGE,
    RETURN,
    START,
    Thoughts,
)
from router.text.formats.typed_values import properties_of

ENDS = (MESSAGE_END, HARMONY_CALL, RETURN, START, CHANNEL)
"""Tags that end a message; the last two begin the next header."""
END = re.compile("|".join(map(re.escape, ENDS)))
HEADER_BEGINNINGS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
RECIPIENT = re.compile(rf"\bto=(?:([^<]{{1,256}}?)\s*{re.escape(CONSTRAIN)}|([^\s<]{{1,256}}))")
"""Recipient in a header; contains spaces only where the type of the text is marked."""
CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
FUNCTIONS = "functions."
NOT_CALLED = ("", "all", "assistant", "user")
"""Recipients other than tools."""
MAX_HEADER_CHARS = 1024
HARMONY_TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, MESSAGE_END, RETURN, HARMONY_CALL)


class Kind(Enum):
    """Kind of a message's text."""

    THOUGHT = "thought"
    CONTENT = "content"
    NONE = "none"  # behind the arguments of a call, dropped


class HarmonyAnswer:
    """Reader of an answer; text without a header is content. Each part gets text of a single message.

    Attributes:
        cut_header: header of the last message, if the answer ended inside of it.
    """

    def __init__(self, thoughts: Thoughts, calls: CallWriter) -> None:
        self._calls = calls
        self._is_header = thoughts == "may come"
        self._kind = Kind.THOUGHT if thoughts == "have begun" else Kind.CONTENT
        self._written: set[Kind] = set()  # kinds of text that the answer has
        self._break = ""  # between two messages of a kind
        self._arguments: ArgumentsReader | None = None
        self._has_arguments = False  # of the current call
        self.held = HeldText(follows_tag=False)
        self.cut_header = ""

    @property
    def holds_content(self) -> bool:
        return not self._is_header and self._kind is Kind.CONTENT and bool(self.held.text)

    def step(self, part: Part, is_last: bool) -> bool:
        """Add the next certain part to the empty `part`; tell whether another may follow."""
        if self._is_header:
            return self._header(part, is_last)
        if self._arguments is not None:
            return self._argue(self._arguments, part, is_last)
        return self._text(part, is_last)

    def _header(self, part: Part, is_last: bool) -> bool:
        """Read a header once it is complete; drop a header cut off."""
        self.held.text = self.held.text.lstrip()
        text = self.held.text[:MAX_HEADER_CHARS]
        may_wait = len(text) < MAX_HEADER_CHARS
        if not text.startswith(HEADER_BEGINNINGS):
            if may_wait and not is_last and any(each.startswith(text) for each in HEADER_BEGINNINGS):
                return False
            self._begin(Kind.CONTENT)
            return True
        header, tag, _ = text.partition(MESSAGE)
        if tag:
            self.held.text = self.held.text[len(header) + len(tag) :]
            self._begin_message(header, part)
        elif may_wait:
            if is_last:
                self.cut_header, self.held.text = text.removeprefix(NEXT_MESSAGE), ""
            return False
        else:  # too long for a header
            self._begin(Kind.CONTENT)
            self._add(text, part)
            self.held.text = self.held.text[len(text) :]
        return True

    def _begin_message(self, header: str, part: Part) -> None:
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        name = (recipient[1] or recipient[2]) if recipient else ""
        called = name.removeprefix(FUNCTIONS)
        is_thought = channel is not None and channel[1] == "analysis"
        is_call = called not in NOT_CALLED and (called != name or not is_thought)
        if is_call and not self._calls.is_full:
            self._is_header = False
            self._calls.begin(part, called)
            self._arguments, self._has_arguments = ArgumentsReader(HARMONY_CALL), False
        else:
            self._begin(Kind.THOUGHT if is_thought else Kind.CONTENT)

    def _begin(self, kind: Kind) -> None:
        self._is_header, self._kind = False, kind
        self._break = "\n" if kind in self._written else ""

    def _argue(self, reader: ArgumentsReader, part: Part, is_last: bool) -> bool:
        arguments, rest = reader.feed(self.held.text, is_last=is_last)
        self._calls.add_arguments(part, arguments)
        self._has_arguments = self._has_arguments or bool(arguments.strip())
        self.held.text = rest or ""
        if rest is None:
            return False
        if not self._has_arguments:
            self._calls.add_arguments(part, "{}")
        self._calls.end()
        self._arguments = None
        self._begin(Kind.NONE)
        return True

    def _text(self, part: Part, is_last: bool) -> bool:
        """Read text of a message, up to the tag behind."""
        text = self.held.text
        found = END.search(text)
        num_held = 0 if is_last else max(num_begun(text, tag) for tag in ENDS)
        end = found.start() if found else len(text) - num_held
        self._add(text[:end], part)
        self._is_header = found is not None
        is_next = found is not None and found[0] in (START, CHANNEL)
        self.held.text = text[end:] if found is None or is_next else text[found.end() :]
        return self._is_header

    def _add(self, text: str, part: Part) -> None:
        if not text or self._kind is Kind.NONE:
            return
        text, self._break = self._break + text, ""
        self._written.add(self._kind)
        if self._kind is Kind.THOUGHT:
            part.thought += text
        else:
            part.content += text


def with_thinking(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return messages as the template takes them: thoughts named `thinking`, and a single call in each message.

    The results of several calls follow each its own call. Text beside a call becomes part of the thoughts.
    """
    changed: list[JsonObject] = []
    for message, results in with_results(messages):
        changed += _turn(message, results) if message.get("role") == "assistant" else [message]
    return changed


def _turn(message: JsonObject, results: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Yield an assistant's messages, each with a single call at most, and the results of the calls."""
    left = list(results)
    for number, call in enumerate(message.get("tool_calls") or [None]):
        yield _answer(message, call, is_first=number == 0)
        own = next((each for each in left if call and each.get("tool_call_id") == call.get("id")), None)
        if own is not None:
            left.remove(own)
            yield own
    yield from left


def _answer(message: JsonObject, call: JsonObject | None, *, is_first: bool) -> JsonObject:
    """Return an assistant's message with a single call at most."""
    changed = {name: value for name, value in message.items() if name != "tool_calls"}
    thoughts, content = (message.get("reasoning_content") or "", message.get("content") or "") if is_first else ("", "")
    if call is not None:
        thoughts, content = "\n\n".join(filter(None, (thoughts, content))), ""
        changed["tool_calls"] = [call]
    return changed | {"content": content} | ({"thinking": thoughts} if thoughts else {})


def with_descriptions(tools: Sequence[Json]) -> list[Json]:
    """Return tools as the template takes them: each with a description, and defaults of choices as texts."""
    return [tool | {"function": _described(tool["function"])} for tool in tools]


def _described(function: JsonObject) -> JsonObject:
    schema: JsonObject = function.get("parameters") or {}
    properties = properties_of(schema)
    changed: JsonObject = {"description": function.get("description") or ""}
    if properties:
        changed["parameters"] = {**schema, "properties": {key: _text_default(each) for key, each in properties.items()}}
    return function | changed


def _text_default(schema: Json) -> Json:
    """Return a parameter's schema with a text as default, where the template joins the default to a text."""
    has_choices = isinstance(schema, dict) and bool(schema.get("enum") or schema.get("oneOf"))
    if not has_choices or "default" not in schema or isinstance(schema["default"], str):
        return schema
    return schema | {"default": json.dumps(schema["default"], ensure_ascii=False)}
