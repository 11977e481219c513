"""Who a worker is: a name that stays, an epoch that does not, and the connections that are this incarnation's."""

import os
import secrets
import socket

from common.wire.messages import Message, Role

BEAT_SUFFIX = b"#beat"


def make_worker_id(role: Role, configured: str) -> str:
    """The configured name, or role, host name and process id: containers share process ids, not host names."""
    return configured or f"{role.name.lower()}-{socket.gethostname()}-{os.getpid()}"


def make_epoch() -> int:
    """A random 63-bit number, new at each start."""
    return secrets.randbits(63)


def connection_of(worker_id: str, epoch: int) -> bytes:
    """The identity under which an incarnation connects; two of one name do not take connections from each other."""
    return f"{worker_id}.{epoch:x}".encode()


def is_from(connection: bytes, message: Message) -> bool:
    """Whether a message came over a connection of the incarnation that it names."""
    worker_id, epoch = getattr(message, "worker_id", ""), getattr(message, "epoch", 0)
    return connection.removesuffix(BEAT_SUFFIX) == connection_of(worker_id, epoch)
