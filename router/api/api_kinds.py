"""Differences between the APIs of completions, chats and responses: reading of bodies, shape of answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.base.json_file import JsonObject
from router.answers.chat_bodies import ChatChunkWriter, chat_choice_body
from router.answers.choices import StreamedChoices, WholeChoices
from router.answers.completion_bodies import ChunkWriter, choice_body, prompt_body
from router.answers.request_choices import Job
from router.answers.responses_answer import StreamedResponse, WholeResponse
from router.base.helper_frames import Kind
from router.dispatch.completion.choice import Delivery
from router.dispatch.completion.state import ID_PREFIX


class WholeAnswer(Protocol):
    """A response sent once all completions have ended."""

    def add(self, delivery: Delivery) -> None: ...
    async def body(self) -> str: ...


class StreamedAnswer(Protocol):
    """A response sent in pieces while completions run."""

    async def events(self, deliveries: list[Delivery]) -> bytes: ...
    def end(self, *, is_complete: bool) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Api:
    """Properties of an API: the prompt's field, the response head, and makers of answers."""

    kind: Kind
    prompt_field: str  # name of the prompt in errors
    head: Callable[[str, str, bool], JsonObject]
    """Fields shared by all parts of a response, from request id, model name and `is_streamed`."""
    whole: Callable[[Job], WholeAnswer]
    streamed: Callable[[Job], StreamedAnswer]


def _completion_head(request_id: str, model: str, is_streamed: bool) -> JsonObject:
    return {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}


def _chat_head(request_id: str, model: str, is_streamed: bool) -> JsonObject:
    name = "chat.completion.chunk" if is_streamed else "chat.completion"
    return {"id": f"chat{request_id}", "object": name, "created": int(time.time()), "model": model}


def _response_head(request_id: str, model: str, is_streamed: bool) -> JsonObject:
    response_id = f"resp_{request_id.removeprefix(ID_PREFIX)}"
    return {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model}


COMPLETIONS = Api(
    kind=Kind.COMPLETION,
    prompt_field="prompt",
    head=_completion_head,
    whole=partial(WholeChoices, choice_body=choice_body),
    streamed=partial(StreamedChoices, writer=ChunkWriter),
)
CHATS = Api(
    kind=Kind.CHAT,
    prompt_field="messages",
    head=_chat_head,
    whole=partial(WholeChoices, choice_body=chat_choice_body, prompt_body=prompt_body),
    streamed=partial(StreamedChoices, writer=ChatChunkWriter),
)
RESPONSES = Api(
    kind=Kind.RESPONSE,
    prompt_field="input",
    head=_response_head,
    whole=WholeResponse,
    streamed=StreamedResponse,
)
