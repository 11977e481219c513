"""Identity of a worker or memory server: a lasting name, an epoch per start, and connection names."""

import os
import secrets
import socket

from common.wire.messages.memory_reports import MemoryReport
from common.wire.messages.senders import FromFront, FromOperator
from common.wire.messages.worker import Message

BEAT_SUFFIX = b"#beat"


def make_id(kind: str, configured: str) -> str:
    """Return the configured name, or kind, host name and process id.

    The host name is needed because containers share process ids, not host names.
    """
    return configured or f"{kind}-{socket.gethostname()}-{os.getpid()}"


def make_epoch() -> int:
    """Return a random 63-bit number, new at each start."""
    return secrets.randbits(63)


def connection_of(worker_id: str, epoch: int) -> bytes:
    """Return an incarnation's connection name. The epoch inside keeps two incarnations' connections apart."""
    return f"{worker_id}.{epoch:x}".encode()


def is_from(connection: bytes, message: Message) -> bool:
    """Tell whether a message names the incarnation that owns the connection."""
    if isinstance(message, MemoryReport):
        speaker = message.server_id
    elif isinstance(message, FromFront):
        speaker = message.front_id
    else:
        speaker = message.operator_id if isinstance(message, FromOperator) else getattr(message, "worker_id", "")
    return connection.removesuffix(BEAT_SUFFIX) == connection_of(speaker, getattr(message, "epoch", 0))
