"""A worker's connection to a memory server, its own or another pool's; greets first, and never waits."""

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from common.base.errors import ConfigError, MemoryLost
from common.memory.base.channel import Channel, Gone
from common.wire.messages.memory import MemoryHello, MemoryMessage, MemoryRefused, MemoryVisit
from common.wire.messages.worker import Message
from common.wire.transport.endpoints import peer_of

ASK_S = 1.0
MAX_UNANSWERED = 10
Arrived = tuple[Message, int | None]
"""A message and its descriptor."""


class Connection:
    """A connection with a greeting; claims end with it. Several threads may send.

    `ask_s` is the time between two questions about the server's life, `max_unanswered` their number before a loss.

    Raises OSError if no server listens.

    Args:
        greeting: names this worker; sent first.
        descriptor: sent with the greeting; stays the caller's.
    """

    ask_s, max_unanswered = ASK_S, MAX_UNANSWERED

    def __init__(self, path: Path, greeting: MemoryHello | MemoryVisit, descriptor: int | None = None) -> None:
        self.path = path
        self.channel = Channel(_connected(path))
        self._sending = threading.Lock()
        try:
            self.send(greeting, descriptor)  # fits into a new connection's buffer
        except BaseException:
            self.close()
            raise

    def send(self, message: MemoryMessage, descriptor: int | None = None) -> None:
        """Send a message, or keep the message until `receive`; raises MemoryLost."""
        try:
            with self._sending:
                self.channel.send(message, descriptor)
        except Gone as gone:
            raise MemoryLost(self.problem(str(gone))) from None

    def receive(self) -> Iterator[Arrived]:
        """Yield arrived messages; the caller closes descriptors.

        Raises ConfigError for a refusal, and MemoryLost at the end.
        """
        try:
            with self._sending:
                self.channel.flush()
            for message, descriptor in self.channel.receive():
                if isinstance(message, MemoryRefused):
                    raise ConfigError(self.problem(message.reason))
                yield message, descriptor
        except Gone as gone:
            raise MemoryLost(self.problem(str(gone))) from None

    @property
    def is_sending(self) -> bool:
        """Tell whether messages are unsent."""
        return bool(self.channel.unsent)

    @property
    def num_unsent_bytes(self) -> int:
        return self.channel.num_unsent_bytes

    @property
    def pollable(self) -> "Connection":
        """Readable when a message has come."""
        return self

    @property
    def has_ended(self) -> bool:
        """Tell whether the server is gone, even if unread messages remain."""
        poll = select.poll()
        poll.register(self.channel, select.POLLRDHUP)
        return bool(poll.poll(0))

    def problem(self, what: str) -> str:
        """Prefix `what` with the server's socket path, for an error message."""
        return f"memory server {self.path}: {what}"

    def fileno(self) -> int:
        return self.channel.fileno()

    def close(self) -> None:
        self.channel.close()


def _connected(path: Path) -> socket.socket:
    """Connect to a socket; raises OSError.

    Raises PermissionError for another user's server, because the server would get weights and prompts.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(str(path))
        _, user, _ = peer_of(connection)
        if user != os.getuid():
            raise PermissionError(errno.EPERM, f"a process of user {user} is there")
    except BaseException:
        connection.close()
        raise
    return connection
