"""What each API over completions has of its own: how its bodies are read, and how its responses look."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.chat_responses import ChatChunkWriter, chat_choice_body
from router.helper_frames import Kind
from router.openai_api import ResponseOptions
from router.request_state import Completion
from router.responses import ChunkWriter, choice_body


@dataclass(frozen=True, slots=True)
class Front:
    """One of the APIs; everything else is the same for all."""

    kind: Kind
    prompt_field: str  # what errors about a prompt are about
    id_prefix: str
    object_name: str
    chunk_name: str
    choice: Callable[[str, Completion, ResponseOptions], dict[str, Any]]
    writer: type[ChunkWriter]

    def head(self, request_id: str, model: str, *, stream: bool) -> dict[str, Any]:
        """The fields that all parts of a response share."""
        name = self.chunk_name if stream else self.object_name
        return {"id": self.id_prefix + request_id, "object": name, "created": int(time.time()), "model": model}


COMPLETIONS = Front(Kind.COMPLETION, "prompt", "", "text_completion", "text_completion", choice_body, ChunkWriter)
CHATS = Front(
    Kind.CHAT, "messages", "chat", "chat.completion", "chat.completion.chunk", chat_choice_body, ChatChunkWriter
)
