"""What the parts of a server have for its clients."""

from typing import NamedTuple

from common.wire.memory_messages import MemoryMessage


class Answer(NamedTuple):
    """A message for a client, and a descriptor that goes along."""

    client: int
    message: MemoryMessage
    descriptor: int | None = None


class Misbehaved(Exception):
    """A client said what cannot be said now."""
