"""OpenAI's response bodies of chats: a message in place of a text, deltas of it in a stream."""

import json
from collections.abc import Mapping
from typing import Any

from router.chat_answer import AnswerParser, Part
from router.logprobs import LogprobLog
from router.openai_api import ResponseOptions
from router.request_state import Completion, Delivery
from router.responses import ChunkWriter, ending_of

ROLE = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'


def chat_choice_body(text: str, completion: Completion, options: ResponseOptions) -> dict[str, Any]:
    """A choice of a response that is not streamed."""
    log = completion.logprobs
    parser = _parser(options)
    part = parser.feed(text, is_last=True)
    content = None if part.calls else ""
    choice = {
        "index": completion.index,
        "message": {"role": "assistant", "content": content, "refusal": None} | _fields(part),
        "logprobs": log and log.chat_part(0, len(completion.outputs)),
    }
    ending = ending_of(completion, options)
    return choice | ending | {"finish_reason": _reason(parser, ending["finish_reason"])}


class ChatChunkWriter(ChunkWriter):
    """Server-sent events of one choice, of which the first says who speaks."""

    def __init__(self, head: dict[str, Any], options: ResponseOptions, completion: Completion) -> None:
        super().__init__(head, options, completion)
        self._parser = _parser(options)

    def chunk(self, delivery: Delivery) -> bytes:
        first = b"" if self._num_sent else self._role_event()
        return first + super().chunk(delivery)

    def _role_event(self) -> bytes:
        nothing_yet = Delivery(self._completion.index, "")
        return f"{self._before}{ROLE}}}]{self._usage(nothing_yet)}}}\n\n".encode("ascii")

    def _content(self, delivery: Delivery) -> str:
        part = self._parser.feed(delivery.text, is_last=delivery.finish_reason is not None)
        return f'"delta": {json.dumps(_fields(part) or {"content": ""})}'

    def _finish_reason(self, reason: str) -> str:
        return _reason(self._parser, reason)

    @staticmethod
    def _part(log: LogprobLog, begin: int, end: int) -> Mapping[str, Any]:
        return log.chat_part(begin, end)


def _parser(options: ResponseOptions) -> AnswerParser:
    return AnswerParser(thoughts=options.thoughts, tool_format=options.tool_format)


def _fields(part: Part) -> dict[str, Any]:
    """Of a message, or of a delta: those that have something in them."""
    fields = {"reasoning_content": part.thought, "content": part.content, "tool_calls": part.calls}
    return {name: value for name, value in fields.items() if value}


def _reason(parser: AnswerParser, reason: str) -> str:
    return "tool_calls" if parser.has_called and reason == "stop" else reason
