"""Who a worker or memory server is: a name that stays, an epoch that does not, and its connections."""

import os
import secrets
import socket

from common.wire.messages.memory_reports import MemoryReport
from common.wire.messages.operator import FROM_OPERATORS
from common.wire.messages.worker import Message, Role

BEAT_SUFFIX = b"#beat"


def make_worker_id(role: Role, configured: str) -> str:
    """The name of a worker; see `make_id`."""
    return make_id(role.name.lower(), configured)


def make_id(kind: str, configured: str) -> str:
    """The configured name, or kind, host name and process id: containers share process ids, not host names."""
    return configured or f"{kind}-{socket.gethostname()}-{os.getpid()}"


def make_epoch() -> int:
    """A random 63-bit number, new at each start."""
    return secrets.randbits(63)


def connection_of(worker_id: str, epoch: int) -> bytes:
    """The identity under which an incarnation connects; two of one name do not take connections from each other."""
    return f"{worker_id}.{epoch:x}".encode()


def is_from(connection: bytes, message: Message) -> bool:
    """Whether a message came over a connection of the incarnation that it names."""
    if isinstance(message, MemoryReport):
        speaker = message.server_id
    else:
        speaker = message.operator_id if isinstance(message, FROM_OPERATORS) else getattr(message, "worker_id", "")
    return connection.removesuffix(BEAT_SUFFIX) == connection_of(speaker, getattr(message, "epoch", 0))
