"""Who a worker is: a name that stays, an epoch that does not."""

import os
import secrets
import socket

from common.wire.messages import Role


def make_worker_id(role: Role, configured: str) -> str:
    """The configured name, or role, host name and process id: containers share process ids, not host names."""
    return configured or f"{role.name.lower()}-{socket.gethostname()}-{os.getpid()}"


def make_epoch() -> int:
    """A random 63-bit number, new at each start."""
    return secrets.randbits(63)
