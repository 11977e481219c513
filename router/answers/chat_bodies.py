"""OpenAI's response bodies of chats: a message instead of a text, deltas in a stream."""

import asyncio
import json
from collections.abc import Mapping

from common.base.json_file import Json, JsonObject
from router.answers.completion_bodies import ChunkWriter, ending_of, prompt_body
from router.base.shapes import ToolCall
from router.dispatch.completion.choice import Choice, Delivery
from router.requests.completion_api import ResponseOptions
from router.text.chat_answer import MAX_PIECE_CHARS, AnswerParser
from router.text.formats.parts import CallPiece, Part, joined
from router.text.logprobs import LogprobLog

ROLE = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'


async def chat_choice_body(text: str, choice: Choice, options: ResponseOptions) -> JsonObject:
    """Return a choice of a whole response; give way to other tasks while the text is read."""
    log = choice.logprobs
    parser, parts = parser_of(options), []
    for begin in range(0, len(text), MAX_PIECE_CHARS):
        parts.append(parser.feed(text[begin : begin + MAX_PIECE_CHARS]))
        await asyncio.sleep(0)
    parts.append(parser.feed("", is_last=True))
    body = {
        "index": choice.spec.index,
        "message": _message(joined(parts)),
        "logprobs": log and log.chat_part(0, len(choice.output.token_ids)),
    }
    ending = ending_of(choice, options)
    return body | ending | {"finish_reason": _reason(parser, ending["finish_reason"])}


class ChatChunkWriter(ChunkWriter):
    """Server-sent events of a choice; the first event gives the role. An event without news is left out."""

    def __init__(self, head: JsonObject, options: ResponseOptions, choice: Choice) -> None:
        super().__init__(head, options, choice)
        self._parser = parser_of(options)
        self._has_begun = False
        self._delta = Part()  # of the current delivery

    def chunk(self, delivery: Delivery) -> bytes:
        is_last = delivery.finish_reason is not None
        first = b"" if self._has_begun else self._role_event()
        self._has_begun = True
        self._delta = self._parser.feed(delivery.text, is_last=is_last)
        is_news = is_last or self._tells_tokens or self._delta != Part()
        return first + (super().chunk(delivery) if is_news else b"")

    def _role_event(self) -> bytes:
        nothing_yet = Delivery(self._choice.spec.index, "")
        prompt = prompt_body(self._choice, self._options)
        extra = f", {json.dumps(prompt)[1:-1]}" if prompt else ""
        return f"{self._before}{ROLE}}}]{self._rest(nothing_yet)}{extra}}}\n\n".encode("ascii")

    def _prompt_body(self) -> JsonObject:
        """Return nothing, because the first event has the prompt's ids beside the choice."""
        return {}

    def _content(self, delivery: Delivery) -> str:
        return f'"delta": {json.dumps(_delta(self._delta))}'

    def _finish_reason(self, reason: str) -> str:
        return _reason(self._parser, reason)

    @staticmethod
    def _part(log: LogprobLog, begin: int, end: int) -> Mapping[str, Json]:
        return log.chat_part(begin, end)


def parser_of(options: ResponseOptions) -> AnswerParser:
    """Make the parser of an answer."""
    return AnswerParser(
        thoughts=options.thoughts,
        tags=options.tags,
        tells_thoughts=options.tells_thoughts,
        tool_format=options.tool_format,
        takes_calls=options.takes_calls,
        forced=options.forced,
        schemas=json.loads(options.tool_schemas),
    )


def _message(part: Part) -> JsonObject:
    """Return a whole answer as a message, with thoughts and calls only if present."""
    thought = {"reasoning_content": part.thought} if part.thought else {}
    calls = {"tool_calls": list(map(_call, part.calls))} if part.calls else {}
    content = part.content or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None} | thought | calls


def _call(piece: CallPiece) -> ToolCall:
    """Return a complete tool call."""
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


def _delta(part: Part) -> JsonObject:
    """Return the fields gained by a message; an empty content if nothing is gained."""
    calls = list(map(_call_delta, part.calls))
    fields = {"reasoning_content": part.thought, "content": part.content, "tool_calls": calls}
    return {name: value for name, value in fields.items() if value} or {"content": ""}


def _call_delta(piece: CallPiece) -> JsonObject:
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index, **_call(piece)}


def _reason(parser: AnswerParser, reason: str) -> str:
    return "tool_calls" if parser.has_called and reason == "stop" else reason
