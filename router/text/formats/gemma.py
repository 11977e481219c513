"""Tool calls of Gemma 4, `call:NAME{key:<|"|>text<|"|>,n:3}`, whose arguments become JSON while being written.

Keys are bare, and texts stand between quotation tags, without escapes. An end tag within a text is text. The tag is
withheld until the text ends, because a model may forget to end a text. In such a case the tag ends the call.
"""

import json
import re
from collections.abc import Sequence

from common.base.json_file import JsonObject
from router.text.formats.history import with_results
from router.text.formats.parts import (
    MAX_WITHHELD_CHARS,
    CallWriter,
    HeldText,
    Part,
    Step,
    begun,
    behind_call,
    in_json,
    num_begun,
    read_head,
)
from router.text.formats.shapes import GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE
from router.text.formats.typed_values import WORDS

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
CONSTANTS = ("true", "false", "null")
CLOSERS = {"{": "}", "[": "]"}
TAG = re.escape(GEMMA_CALL_END)
KEY_END = re.compile(rf"[:}}]|{TAG}")
VALUE_END = re.compile(rf"[,}}\]]|{TAG}")
JSON_SIGN = re.compile(rf'"|\\.|{TAG}', re.DOTALL)
"""The end of a text between JSON's quotes, an escape in it, or the end of the call."""
HEAD = re.compile(rf"\s{{0,64}}call:([^{{<\n]{{1,256}})(?:(?=\{{)|(?={TAG})(?P<none>))")
"""Beginning of a call, up to its arguments, or up to the end tag if there are none."""
BEGUN_HEAD = re.compile(rf"\s{{0,64}}(?:{begun('call:')}|call:[^{{<\n]{{0,256}}{begun(GEMMA_CALL_END)})")


class GemmaCall:
    """Reader of a call between call tags."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._arguments: GemmaArguments | None = None
        self._is_behind = False  # the arguments

    def step(self, held: HeldText, part: Part, is_last: bool) -> Step:
        if self._is_behind:
            return behind_call(held, GEMMA_CALL, GEMMA_CALL_END, is_last)
        if self._arguments is None:
            return self._begin(held, part, is_last)
        arguments, rest = self._arguments.feed(held.text, is_last=is_last)
        self._calls.add_arguments(part, arguments)
        held.text = rest or ""
        if rest is None:
            return Step.WAIT
        self._calls.end()
        self._is_behind = True
        return Step.AGAIN

    def _begin(self, held: HeldText, part: Part, is_last: bool) -> Step:
        """Begin the call if its head is complete, or content if the text cannot become a call."""
        head = read_head(HEAD, BEGUN_HEAD, held, self._calls, is_last)
        if isinstance(head, Step):
            return head
        self._calls.begin(part, head[1].strip())
        self._arguments = GemmaArguments()
        if head["none"] is not None:
            self._calls.add_arguments(part, "{}")
            self._calls.end()
            self._is_behind = True
        return Step.AGAIN


class GemmaArguments:
    """Streaming converter of arguments to JSON."""

    def __init__(self) -> None:
        self._held = ""  # not converted yet
        self._at = 0  # position in `_held`; earlier text has been searched
        self._open: list[str] = []  # braces and brackets
        self._read = self._value  # reader of what comes next
        self._quoted = ""  # key before a colon
        self._is_first = True  # in the innermost object or list
        self._written: list[str] = []

    def feed(self, text: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return certain JSON, and once the arguments have ended, the text behind; None before the end."""
        self._held += text
        while self._read(is_last) and self._open:
            pass
        written, self._written = "".join(self._written), []
        return written, None if self._open else self._held

    def _take(self, num_chars: int) -> str:
        taken, self._held, self._at = self._held[:num_chars], self._held[num_chars:], 0
        return taken

    def _find(self, pattern: re.Pattern[str], tags: tuple[str, ...]) -> re.Match[str] | None:
        """Search text not searched before; tags may have begun at the end."""
        found = pattern.search(self._held, self._at)
        if found is None:
            self._at = len(self._held) - max(num_begun(self._held, tag) for tag in tags)
        return found

    def _is_undecided(self, is_last: bool, *tags: str) -> bool:
        """Drop white space; tell whether nothing certain is left before one of the tags could come."""
        self._held = self._held.lstrip()
        return not self._held or (not is_last and any(tag.startswith(self._held) for tag in tags))

    def _value(self, is_last: bool) -> bool:
        """Begin a value; tell whether it has begun."""
        if self._is_undecided(is_last, GEMMA_QUOTE[:-1]):
            return False
        char = self._held[0]
        if self._held.startswith(GEMMA_QUOTE):
            self._take(len(GEMMA_QUOTE))
            self._written.append('"')
            self._read = self._text
        elif char in CLOSERS:
            self._take(1)
            self._open.append(char)
            self._written.append(char)
            self._is_first, self._read = True, self._key if char == "{" else self._item
        elif char == '"':
            self._read = self._json_text
        else:
            self._read = self._bare
        return True

    def _text(self, is_last: bool) -> bool:
        """Write a text, up to its end."""
        end = self._held.find(GEMMA_QUOTE, self._at)
        if end >= 0:
            self._written.append(f'{in_json(self._take(end))}"')
            self._take(len(GEMMA_QUOTE))
            self._read = self._behind
            return True
        self._at = len(self._held) - num_begun(self._held, GEMMA_QUOTE)
        tag = self._held.rfind(GEMMA_CALL_END, 0, max(0, len(self._held) - MAX_WITHHELD_CHARS))
        tag = self._held.find(GEMMA_CALL_END, tag + 1)
        num_sure = min(self._at, tag if tag >= 0 else len(self._held) - num_begun(self._held, GEMMA_CALL_END))
        if is_last and tag >= 0:
            self._written.append(f'{in_json(self._take(tag))}"')
            self._close_all()
            return True
        num_sure = len(self._held) if is_last else num_sure
        self._written.append(in_json(self._held[:num_sure]))
        self._held, self._at = self._held[num_sure:], self._at - num_sure
        return False

    def _json_text(self, is_last: bool) -> bool:
        """Write a text between JSON's quotes once it is complete; a text without an end is a bare value."""
        self._at = max(self._at, 1)
        while sign := JSON_SIGN.search(self._held, self._at):
            if sign[0] == '"':
                self._written.append(_requoted(self._take(sign.end())))
                self._read = self._behind
                return True
            if sign[0] == GEMMA_CALL_END:
                self._at, self._read = 0, self._bare
                return True
            self._at = sign.end()
        num_begun_chars = max(self._held.endswith("\\"), num_begun(self._held, GEMMA_CALL_END))
        self._at = max(self._at, len(self._held) - num_begun_chars)
        return self._lose(is_last)

    def _bare(self, is_last: bool) -> bool:
        """Write a value without quotation tags, once it is complete."""
        end = self._find(VALUE_END, (GEMMA_CALL_END,))
        if end is None:
            return self._lose(is_last)
        self._written.append(_scalar(self._take(end.start()).strip()))
        self._read = self._behind
        return True

    def _key(self, is_last: bool) -> bool:
        """Write a key, or end an object."""
        if self._is_undecided(is_last, GEMMA_QUOTE[:-1], GEMMA_CALL_END[:-1]):
            return False
        if self._held.startswith(GEMMA_QUOTE):
            return self._quoted_key(is_last)
        end = self._find(KEY_END, (GEMMA_CALL_END,))
        if end is None:
            return self._lose(is_last)
        key = self._take(end.start()).strip()
        is_quoted = len(key) > 1 and key[0] == key[-1] == '"'
        self._end_key(key[1:-1] if is_quoted else key, end[0])
        return True

    def _quoted_key(self, is_last: bool) -> bool:
        end = self._held.find(GEMMA_QUOTE, max(self._at, len(GEMMA_QUOTE)))
        if end < 0:
            self._at = len(self._held) - num_begun(self._held, GEMMA_QUOTE)
            return self._lose(is_last)
        self._quoted = self._held[len(GEMMA_QUOTE) : end]
        self._take(end + len(GEMMA_QUOTE))
        self._read = self._colon
        return True

    def _colon(self, is_last: bool) -> bool:
        """Find the colon behind a quoted key; a key without a value is dropped."""
        end = self._find(KEY_END, (GEMMA_CALL_END,))
        if end is None:
            self._take(self._at)
            return False
        self._take(end.start())
        self._end_key(self._quoted, end[0])
        return True

    def _end_key(self, key: str, sign: str) -> None:
        """Write a key before its colon; another sign ends the object, or all."""
        if sign == ":":
            self._separate()
            self._written.append(f"{json.dumps(key, ensure_ascii=False)}: ")
            self._read = self._value
            self._take(1)
        elif sign == "}":
            self._close()
        else:
            self._close_all()

    def _lose(self, is_last: bool) -> bool:
        """Drop a key or value that is cut off."""
        if is_last:
            self._take(len(self._held))
        return False

    def _item(self, is_last: bool) -> bool:
        """Begin an item, or end a list."""
        if self._is_undecided(is_last, GEMMA_CALL_END[:-1]):
            return False
        if self._held.startswith(("]", "}")):
            self._close()
        elif self._held.startswith(GEMMA_CALL_END):
            self._close_all()
        else:
            self._separate()
            self._read = self._value
        return True

    def _behind(self, is_last: bool) -> bool:
        """Find what follows a value."""
        end = self._find(VALUE_END, (GEMMA_CALL_END,))
        if end is None:
            self._take(self._at)
            return False
        self._take(end.start())
        if end[0] == ",":
            self._take(1)
            self._read = self._key if self._open[-1] == "{" else self._item
        elif end[0] == GEMMA_CALL_END:
            self._close_all()
        else:
            self._close()
        return True

    def _separate(self) -> None:
        self._written.append("" if self._is_first else ", ")
        self._is_first = False

    def _close(self) -> None:
        """End the innermost object or list at its last character."""
        self._take(1)
        self._written.append(CLOSERS[self._open.pop()])
        self._is_first, self._read = False, self._behind

    def _close_all(self) -> None:
        """End all objects and lists before an early end tag."""
        self._written += [CLOSERS[each] for each in reversed(self._open)]
        self._open.clear()


def with_responses(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return messages as every published template takes them: results of calls inside the message with the calls."""
    changed = []
    for message, results in with_results(messages):
        names = {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        responses = [
            {"name": names.get(each.get("tool_call_id"), each.get("name") or "unknown"), "response": each["content"]}
            for each in results
        ]
        changed.append(message | ({"tool_responses": responses} if responses else {}))
    return changed


def _requoted(text: str) -> str:
    """Return the JSON of a text between quotes, which may have line breaks and wrong escapes."""
    try:
        return json.dumps(json.loads(text, strict=False), ensure_ascii=False)
    except ValueError:
        return json.dumps(text[1:-1], ensure_ascii=False)


def _scalar(text: str) -> str:
    """Return the JSON of a bare value: a number or constant as it is, otherwise a text."""
    if text in CONSTANTS or NUMBER.fullmatch(text):
        return text
    return json.dumps(WORDS.get(text, text), ensure_ascii=False)
