"""What the parts of a server have for its clients."""

from typing import NamedTuple

from common.wire.messages.memory import MemoryMessage


class Answer(NamedTuple):
    """A message for a client, and a descriptor that goes along."""

    client: int
    message: MemoryMessage
    descriptor: int | None = None


class Misbehaved(Exception):
    """A client said what cannot be said now."""
