"""Acceptance of connections; each is served even after acceptance has stopped."""

import asyncio
import contextlib
import errno
import logging
import socket

from aiohttp import web

from common.settings.config import RouterSection
from router.http.connection import Connection
from router.http.connection_limit import REPORT_S, Connections, DescriptorLimits
from router.http.unread_answers import Unread

logger = logging.getLogger(__name__)

SURPLUS_S = 5.0
"""Time for a surplus connection to ask and to be answered."""
PAUSE_S = 0.02
MAX_CHECK_S = 1.0
"""Longest time between two checks of the waits of all connections."""
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
BACKLOG = 2048
"""Connections waiting to be accepted; a full queue costs a SYN retry, 1 s of TTFT."""


class Acceptor(web.BaseSite):
    """Acceptor of connections on bound sockets, during the life of the runner."""

    def __init__(
        self,
        runner: web.AppRunner,
        listeners: list[socket.socket],
        descriptors: DescriptorLimits,
        limits: RouterSection,
        unread: Unread,
    ) -> None:
        super().__init__(runner)
        self._limits, self._unread = limits, unread
        self.own_listeners = listeners
        self._shared: list[socket.socket] = []
        self._descriptors = descriptors
        self.connections = Connections(runner, descriptors)
        self._accepting: list[asyncio.Task[None]] = []
        self._accepting_shared: list[asyncio.Task[None]] = []
        self._checking: asyncio.Task[None] | None = None
        self.port: int = listeners[0].getsockname()[1]
        """Port of the first address."""

    @property
    def name(self) -> str:
        return f"port {self.port}"

    @property
    def num_shared(self) -> int:
        """Number of listeners shared with other processes."""
        return len(self._shared)

    async def start(self, *, accepts: bool = True) -> None:
        """Register with the runner; accept connections now, or else from `accept` on."""
        await super().start()
        self._checking = asyncio.create_task(self._check_forever())
        if accepts:
            self.accept()

    def accept(self) -> None:
        """Accept connections of the acceptor's own listeners."""
        self._accepting += [asyncio.create_task(self._accept_forever(each)) for each in self.own_listeners]

    def share(self, listeners: list[socket.socket]) -> None:
        """Accept connections of borrowed listeners, too, until `unshare`."""
        self._shared = listeners
        self._accepting_shared = [asyncio.create_task(self._accept_forever(each)) for each in listeners]

    def unshare(self) -> None:
        for task in self._accepting_shared:
            task.cancel()
        for listener in self._shared:
            listener.close()
        self._shared, self._accepting_shared = [], []

    def release(self) -> None:
        """Accept no more; open connections, and other processes' use of the listeners, stay."""
        self.unshare()
        for task in self._accepting:
            task.cancel()
        for listener in self.own_listeners:
            listener.close()

    async def stop(self) -> None:
        tasks = [*self._accepting, *self._accepting_shared]
        self.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().stop()
        if self._checking is not None:
            self._checking.cancel()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(min(MAX_CHECK_S, self._limits.header_timeout_s / 4, self._limits.keepalive_s / 4))
            try:
                await self.connections.check()
            except Exception:  # the others are still to be checked, now or next time
                logger.exception("a bug in checking connections")

    async def _accept_forever(self, listener: socket.socket) -> None:
        while True:
            while self.connections.are_too_many:
                self.connections.close_silent()
                await asyncio.sleep(PAUSE_S)
                self.connections.forget_closed()
            try:
                connection = await _accepted(listener)
            except OSError as error:
                logger.warning("cannot accept a connection: %s; trying again in %g s", error.strerror, REPORT_S)
                await asyncio.sleep(REPORT_S)
                continue
            # Shielded, because an accepted connection is served even after the acceptor stops.
            await asyncio.shield(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        if connection.fileno() >= self._descriptors.num_shared and self.connections.close_silent():
            await asyncio.sleep(PAUSE_S)  # descriptors come free meanwhile
            connection = _moved(connection)
        is_surplus = connection.fileno() >= self._descriptors.num_shared
        try:
            transport, accepted = await loop.connect_accepted_socket(
                lambda: Connection(server, self._limits, self._unread), connection
            )
        except OSError:  # the client has gone already
            connection.close()
            return
        if is_surplus:
            loop.call_later(SURPLUS_S, transport.abort)
            self.connections.add_surplus(accepted)


async def _accepted(listener: socket.socket) -> socket.socket:
    """Return the next connection; a cancellation never drops an accepted connection.

    Waiting connections are accepted without asking the event loop, because asking costs more than accepting.
    """
    while True:
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            return connection
        await _readable(listener)


async def _readable(listener: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


def _moved(connection: socket.socket) -> socket.socket:
    """Return the connection under the lowest free descriptor."""
    try:
        moved = connection.dup()
    except OSError:  # no descriptor is free
        return connection
    connection.close()
    return moved


async def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host` that this machine has; an empty host means all.

    Raises OSError if there is none, or another process has the port.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError:
        raise OSError(errno.EINVAL, "no name of a host") from None
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            listeners.append(socket.create_server(address[:2], family=family, backlog=BACKLOG))
        except OSError as error:
            if error.errno in NOT_HERE:  # as ::1 of localhost, where IPv6 is off
                absent = error
                continue
            for listener in listeners:
                listener.close()
            raise
        listeners[-1].setblocking(False)
    if absent is not None and not listeners:
        raise absent
    return listeners
