"""OpenAI's response bodies of chats: a message in place of a text, deltas of it in a stream."""

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from router.logprobs import LogprobLog
from router.openai_api import ResponseOptions
from router.request_state import Completion, Delivery
from router.responses import ChunkWriter, ending_of

ROLE = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'


def chat_choice_body(text: str, completion: Completion, options: ResponseOptions) -> dict[str, Any]:
    """A choice of a response that is not streamed."""
    log = completion.logprobs
    choice = {
        "index": completion.index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": log and log.chat_part(0, len(completion.outputs)),
    }
    return choice | ending_of(completion, options)


class ChatChunkWriter(ChunkWriter):
    """Server-sent events of one choice, of which the first says who speaks."""

    def chunk(self, delivery: Delivery) -> bytes:
        first = b"" if self._num_sent else self._role_event()
        return first + super().chunk(delivery)

    def _role_event(self) -> bytes:
        nothing_yet = Delivery(self._completion.index, "")
        return f"{self._before}{ROLE}}}]{self._usage(nothing_yet)}}}\n\n".encode("ascii")

    def _content(self, text: str) -> str:
        return f'"delta": {{"content": {encode_basestring_ascii(text)}}}'

    @staticmethod
    def _part(log: LogprobLog, begin: int, end: int) -> Mapping[str, Any]:
        return log.chat_part(begin, end)
