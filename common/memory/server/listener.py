"""Listening socket of a memory server; a lock admits a single server for each path."""

import fcntl
import logging
import os
import socket
from pathlib import Path

from common.base.errors import ConfigError
from common.wire.transport.endpoints import is_served, peer_of

logger = logging.getLogger(__name__)

BACKLOG = 64


class SocketInUse(ConfigError):
    """Another process serves this socket."""


class Listener:
    """A listening socket for workers; replaces the socket file of a killed server.

    A lock file beside the socket is held for the listener's life, and its holder may replace the socket file. Raises
    ConfigError if the socket cannot be bound, and SocketInUse if a live server has the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        before = os.umask(0o177)
        try:
            self.lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                self.socket = self._bound()
            except BaseException:
                os.close(self.lock)
                raise
        except OSError as error:
            raise ConfigError(
                f"memory.socket = {path}: {error.strerror}; name a path in a directory that is there and yours"
            ) from None
        finally:
            os.umask(before)

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return a connection and its process id; None for another user's process or an error."""
        try:
            connection, _ = self.socket.accept()
        except OSError as error:  # the client hung up, or no descriptor is left; serve other clients
            logger.warning("a connection cannot be accepted: %s", error)
            return None
        process, user, _ = peer_of(connection)
        if user == os.getuid():
            return connection, process
        logger.warning("a connection of process %d of user %d is refused", process, user)
        connection.close()
        return None

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Remove the socket; the lock file stays, because another process may have opened the file."""
        self.path.unlink(missing_ok=True)
        self.socket.close()
        os.close(self.lock)

    def _bound(self) -> socket.socket:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SocketInUse(f"{self.path} is another memory server's; stop that, or choose another path") from None
        if is_served(self.path):  # by a process without the lock
            raise SocketInUse(f"{self.path} is served by another process; choose another memory.socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener
