"""Handover of listening sockets between processes over a unix socket, so a port outlives a server process.

The giver sends duplicates of the sockets to any connecting process of the giver's user. A client's connection waits in
the kernel's queue until a holder accepts, so no connection is refused while a process starts or ends. `TAKEN` tells the
giver: the receiver accepts connections from now on. The giver hangs up once the sockets are no longer offered.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from common.wire.transport.endpoints import is_served, peer_of

MAX_LISTENERS = 16
MAX_RECEIVERS = 64
HERE, TAKEN = b"h", b"t"
RELIEVED_STATUS = 3
"""Exit status of a router after losing its port to a successor; do not restart the router."""
ANSWER_S = 5.0


class PortOffer:
    """A giver of duplicates of `listeners` to processes connecting at `path`; use `start` and `close`.

    Args:
        path: in a directory closed to other users.
        on_taken: called when a receiver sends `TAKEN`.
    """

    def __init__(
        self, path: Path, listeners: Sequence[socket.socket], on_taken: Callable[[], None] = lambda: None
    ) -> None:
        self.path = path
        self._listeners, self._on_taken = listeners, on_taken
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Bind and accept; raises OSError when another process serves the path."""
        if is_served(self.path):
            raise OSError(f"another process hands out what is at {self.path}")
        self.path.unlink(missing_ok=True)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(MAX_RECEIVERS)
        self._socket.setblocking(False)
        self._spawn(self._accept_forever())

    async def close(self) -> None:
        """Remove the path, and hang up."""
        if self._tasks:
            self.path.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            if len(self._tasks) > MAX_RECEIVERS or peer_of(connection)[1] != os.getuid():
                connection.close()
            else:
                self._spawn(self._give(connection))

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, connection: socket.socket) -> None:
        """Hold the connection until the receiver hangs up."""
        connection.setblocking(False)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            socket.send_fds(connection, [HERE], [listener.fileno() for listener in self._listeners])
            while said := await asyncio.get_running_loop().sock_recv(connection, 1):
                if said == TAKEN:
                    self._on_taken()


class PortLoan:
    """Listening sockets borrowed from another process, with a connection to the giver."""

    def __init__(self, connection: socket.socket, listeners: list[socket.socket]) -> None:
        self.listeners = listeners
        self._connection = connection
        for each in (connection, *listeners):
            each.setblocking(False)

    async def take(self) -> None:
        """Announce accepting from now on, and wait up to `ANSWER_S` until the giver hangs up."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.get_running_loop().sock_sendall(self._connection, TAKEN)
            async with asyncio.timeout(ANSWER_S):
                await self.ended()

    async def ended(self) -> None:
        """Wait until the giver hangs up; the opener of the port hangs up only at the end of its process."""
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self._connection, 1):
                pass

    def close(self) -> None:
        """Hang up; the receiver keeps the listeners."""
        self._connection.close()


async def borrow(path: Path) -> PortLoan | None:
    """Borrow listening sockets at `path`; return None without a giver."""
    return await asyncio.to_thread(_borrowed, path)


def _borrowed(path: Path) -> PortLoan | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(str(path))
        said, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_LISTENERS)
    except OSError:
        connection.close()
        return None
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if said != HERE or not listeners:
        connection.close()
        return None
    return PortLoan(connection, listeners)
