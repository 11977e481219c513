"""Answers of the memory server's parts to clients."""

from typing import NamedTuple

from common.wire.messages.memory import MemoryMessage


class Answer(NamedTuple):
    """A message for a client, and a descriptor to send along."""

    client: int
    message: MemoryMessage
    descriptor: int | None = None


class ProtocolError(Exception):
    """A client sent a message not valid in the client's state."""
