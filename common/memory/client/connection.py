"""A worker's end of a connection to a memory server, at home or as a guest: it greets, and never waits."""

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from common.base.errors import ConfigError, MemoryLost
from common.memory.base.channel import Channel, Gone, peer_of
from common.wire.messages.memory import MemoryHello, MemoryMessage, MemoryRefused, MemoryVisit
from common.wire.messages.worker import Message

Arrived = tuple[Message, int | None]
"""With the descriptor that came along."""


class Connection:
    """What is claimed over it ends with it. Several threads may send.

    Raises OSError when nobody is there.

    Args:
        greeting: who we are, which the server hears first.
        descriptor: that goes along; it stays the caller's.
    """

    def __init__(self, path: Path, greeting: MemoryHello | MemoryVisit, descriptor: int | None = None) -> None:
        self.path = path
        self.channel = Channel(_connected(path))
        self._sending = threading.Lock()
        try:
            self.send(greeting, descriptor)  # for which a new connection has room
        except BaseException:
            self.close()
            raise

    def send(self, message: MemoryMessage, descriptor: int | None = None) -> None:
        """Send, or keep until `receive`; raises MemoryLost."""
        try:
            with self._sending:
                self.channel.send(message, descriptor)
        except Gone as gone:
            raise MemoryLost(self.problem(str(gone))) from None

    def receive(self) -> Iterator[Arrived]:
        """What has arrived; the caller closes descriptors. Raises ConfigError for a refusal, MemoryLost at the end."""
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
        """Whether something could not be sent at once."""
        return bool(self.channel.unsent)

    @property
    def has_ended(self) -> bool:
        """Whether the server is gone, be there still something to receive or not."""
        poll = select.poll()
        poll.register(self.channel, select.POLLRDHUP)
        return bool(poll.poll(0))

    def problem(self, what: str) -> str:
        """That with whose problem it is."""
        return f"memory server {self.path}: {what}"

    def fileno(self) -> int:
        return self.channel.fileno()

    def close(self) -> None:
        self.channel.close()


def _connected(path: Path) -> socket.socket:
    """Raises OSError, PermissionError where another user is there, who would get weights and prompts."""
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
