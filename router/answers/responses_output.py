"""Output items of /v1/responses, and the events for streaming the items as the answer's text grows.

Items stand in the order of beginning: thoughts, texts, calls of functions.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.answers.chat_bodies import parser_of
from router.dispatch.completion.choice import Choice, Delivery
from router.requests.completion_api import ResponseOptions
from router.text.formats.parts import CallPiece

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class Event(NamedTuple):
    """An event of a stream, without the fields common to all events."""

    kind: str
    fields: JsonObject


class TextShape(NamedTuple):
    """Names of fields and events for an item with a single text."""

    kind: str
    id_prefix: str
    field: str  # holds the text as its only part
    part_kind: str
    text_event: str
    part_event: str
    index_field: str  # event field with the number of the part
    fields: Mapping[str, Json]  # constant fields of the item
    part_fields: Mapping[str, Json]
    has_logprobs: bool


MESSAGE = TextShape(
    kind="message",
    id_prefix="msg",
    field="content",
    part_kind="output_text",
    text_event="response.output_text",
    part_event="response.content_part",
    index_field="content_index",
    fields={"role": "assistant"},
    part_fields={"annotations": []},
    has_logprobs=True,
)
THOUGHT = TextShape(
    kind="reasoning",
    id_prefix="rs",
    field="content",
    part_kind="reasoning_text",
    text_event="response.reasoning_text",
    part_event="response.content_part",
    index_field="content_index",
    fields={"summary": []},
    part_fields={},
    has_logprobs=False,
)
SUMMARY = THOUGHT._replace(
    field="summary",
    part_kind="summary_text",
    text_event="response.reasoning_summary_text",
    part_event="response.reasoning_summary_part",
    index_field="summary_index",
    fields={},
)
"""Thoughts as a summary, because some clients show no other thoughts."""


class TextItem:
    """A growing message or reasoning item."""

    def __init__(self, index: int, shape: TextShape) -> None:
        self.shape = shape
        self._id = new_id(shape.id_prefix)
        self._place = {"item_id": self._id, "output_index": index, shape.index_field: 0}
        self._index = index
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []

    def begin(self) -> list[Event]:
        return [
            _item_event("added", self._index, self._body([], IN_PROGRESS)),
            Event(f"{self.shape.part_event}.added", {**self._place, "part": self._part("", [])}),
        ]

    def add(self, text: str, logprobs: list[Json]) -> Event:
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._text_event("delta", {"delta": text}, logprobs)

    def end(self, status: str) -> list[Event]:
        """Close the item and return the last events; the final event has the whole item."""
        text = "".join(self._pieces)
        part = self._part(text, self._logprobs)
        return [
            self._text_event("done", {"text": text}, self._logprobs),
            Event(f"{self.shape.part_event}.done", {**self._place, "part": part}),
            _item_event("done", self._index, self._body([part], status)),
        ]

    def _text_event(self, step: str, fields: Mapping[str, Json], logprobs: list[Json]) -> Event:
        extra = {"logprobs": logprobs} if self.shape.has_logprobs else {}
        return Event(f"{self.shape.text_event}.{step}", {**self._place, **fields, **extra})

    def _part(self, text: str, logprobs: list[Json]) -> JsonObject:
        extra = {"logprobs": logprobs} if self.shape.has_logprobs else {}
        return {"type": self.shape.part_kind, "text": text, **self.shape.part_fields, **extra}

    def _body(self, parts: list[Json], status: str) -> JsonObject:
        shape = self.shape
        return {"type": shape.kind, "id": self._id, **shape.fields, shape.field: parts, "status": status}


class CallItem:
    """A call of a function, with growing arguments."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._body = {"type": "function_call", "id": new_id("fc"), "call_id": call_id, "name": name}
        self._place = {"item_id": self._body["id"], "output_index": index}
        self._index = index
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        return [_item_event("added", self._index, {**self._body, "arguments": "", "status": IN_PROGRESS})]

    def add(self, arguments: str) -> Event:
        self._pieces.append(arguments)
        return Event("response.function_call_arguments.delta", {**self._place, "delta": arguments})

    def end(self, status: str) -> list[Event]:
        """Close the item and return the last events.

        A call with complete arguments has status completed, even in an answer cut off later.
        """
        arguments = "".join(self._pieces)
        extra = {"arguments": arguments}
        body = {**self._body, **extra, "status": COMPLETED if _is_json(arguments) else status}
        name = {"name": self._body["name"]}
        return [
            Event("response.function_call_arguments.done", {**self._place, **name, **extra}),
            _item_event("done", self._index, body),
        ]


class Output:
    """All output items of an answer.

    Attributes:
        items: closed items, as in the response.
        num_thought_tokens: tokens up to the end of the thoughts.
    """

    def __init__(self, options: ResponseOptions, choice: Choice) -> None:
        self._parser = parser_of(options)
        self._thought = SUMMARY if options.has_summary else THOUGHT
        self._log = choice.logprobs
        self._num_sent = 0  # tokens whose log-probabilities are sent or skipped
        self._open: TextItem | CallItem | None = None
        self.items: list[JsonObject] = []
        self.num_thought_tokens = 0

    def add(self, delivery: Delivery) -> list[Event]:
        """Add a delivery's text, and return the events; the last delivery closes all items."""
        is_last = delivery.finish_reason is not None
        parts = self._parser.parts(delivery.text, is_last=is_last)
        logprobs = self._logprobs(delivery, has_content=any(part.content for part in parts))
        events: list[Event] = []
        for part in parts:
            if part.thought:
                self.num_thought_tokens = delivery.num_outputs
                events += self._add_text(self._thought, part.thought, [])
            if part.content:
                events += self._add_text(MESSAGE, part.content, logprobs)
                logprobs = []
            for piece in part.calls:
                events += self._add_call(piece)
        if is_last:
            events += self._end(COMPLETED if delivery.finish_reason == "stop" else INCOMPLETE)
        return events

    def _add_text(self, shape: TextShape, text: str, logprobs: list[Json]) -> Iterable[Event]:
        if not isinstance(self._open, TextItem) or self._open.shape is not shape:
            yield from self._close(COMPLETED)
            self._open = TextItem(len(self.items), shape)
            yield from self._open.begin()
        yield self._open.add(text, logprobs)

    def _add_call(self, piece: CallPiece) -> Iterable[Event]:
        if piece.id:
            yield from self._close(COMPLETED)
            self._open = CallItem(len(self.items), piece.id, piece.name)
            yield from self._open.begin()
        assert isinstance(self._open, CallItem), "pieces of a call follow one another"
        if piece.arguments:
            yield self._open.add(piece.arguments)

    def _end(self, status: str) -> Iterable[Event]:
        """Close the open item.

        An empty answer, or a complete answer of thoughts alone, first gets an empty message.
        """
        is_empty = self._open is None and not self.items
        if is_empty or (status == COMPLETED and isinstance(self._open, TextItem) and self._open.shape is self._thought):
            yield from self._add_text(MESSAGE, "", [])
        yield from self._close(INCOMPLETE if self._parser.is_calling else status)

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.items.append(events[-1].fields["item"])
        self._open = None
        return events

    def _logprobs(self, delivery: Delivery, *, has_content: bool) -> list[Json]:
        """Return log-probabilities of the tokens since the last text; tags and thoughts have none."""
        if self._log is None:
            return []
        begin, end = self._num_sent, delivery.num_outputs
        if has_content or (delivery.text and not self._parser.holds_content):
            self._num_sent = end
        tokens = self._log.chat_part(begin, end)["content"] if has_content else []
        return [{**token, "bytes": token["bytes"] or []} for token in tokens]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _item_event(step: str, index: int, item: JsonObject) -> Event:
    return Event(f"response.output_item.{step}", {"output_index": index, "item": item})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
