"""Where clients come in: no more of them than there are file descriptors for, and some are kept for the router itself.

The kernel gives out the lowest free descriptor, so the number of a connection's own says how many are taken. One below
the limit may stay. The next few are surplus: their completions are refused with 429, so that a client learns why, and
they are closed after one answer. All others wait in the kernel's queue, where they take no descriptor.
"""

import asyncio
import errno
import logging
import socket
import time
from typing import NamedTuple

from aiohttp import hdrs, web

from common.config import RouterSection
from common.errors import ConfigError
from common.serving.open_files import raise_open_files
from router.connection import Connection
from router.membership import MAX_WORKERS
from router.waiting_queue import busy

logger = logging.getLogger(__name__)

LEAST_OPEN_FILES = 256
NUM_SURPLUS = 64
NUM_KEPT = NUM_SURPLUS + 2 * MAX_WORKERS + 64
"""What is not for clients: surplus connections, two of each worker, files and pipes; a quarter where there are few."""
SURPLUS_S = 5.0
"""How long a surplus connection may take to ask and to be answered."""
PAUSE_S = 0.02
REPORT_S = 1.0
BACKLOG = 2048
"""Connections waiting to be accepted; a full queue costs a client a SYN retry, which is a second of TTFT."""


class Places(NamedTuple):
    """How many descriptors there are, from the lowest on."""

    num_shared: int  # that the router and its clients may take together
    num_surplus: int  # beyond those, for connections that are told so; the rest is the router's own


PLACES = web.AppKey("places", Places)


def open_places() -> Places:
    """As many as this process may have; raises ConfigError when they are too few."""
    num_open = raise_open_files()
    if num_open < LEAST_OPEN_FILES:
        raise ConfigError(f"{num_open} open files are allowed: at least {LEAST_OPEN_FILES}; raise `ulimit -n`")
    num_kept = min(NUM_KEPT, num_open // 4)
    places = Places(num_open - num_kept, min(NUM_SURPLUS, num_kept // 2))
    logger.info("%d open files are allowed: up to %d connections of clients, then 429", num_open, places.num_shared)
    return places


def refuse_surplus(request: web.Request) -> None:
    """Raise RequestError for what cannot be served now for want of descriptors."""
    if _is_surplus(request):
        raise busy(f"all {request.app[PLACES].num_shared} connections are taken")


async def close_surplus(request: web.Request, response: web.StreamResponse) -> None:
    """Have a response on a surplus connection be its last; a hook of `on_response_prepare`."""
    if _is_surplus(request):
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


def _is_surplus(request: web.Request) -> bool:
    connection = request.get_extra_info("socket")
    return connection is not None and connection.fileno() >= request.app[PLACES].num_shared


class Door(web.BaseSite):
    """Accepts connections on bound sockets, for as long as the runner lives."""

    def __init__(
        self, runner: web.AppRunner, listeners: list[socket.socket], places: Places, limits: RouterSection
    ) -> None:
        super().__init__(runner)
        self._limits = limits
        self._listeners = listeners
        self._places = places
        self._surplus: set[asyncio.Transport] = set()
        self._num_surplus, self._reported_s = 0, 0.0
        self._accepting: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return f"port {self.port}"

    @property
    def port(self) -> int:
        """Of the first address."""
        port: int = self._listeners[0].getsockname()[1]
        return port

    async def start(self) -> None:
        await super().start()
        self._accepting = [asyncio.create_task(self._accept_forever(listener)) for listener in self._listeners]

    async def stop(self) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await super().stop()

    async def _accept_forever(self, listener: socket.socket) -> None:
        while True:
            while len(self._surplus) >= self._places.num_surplus:
                await asyncio.sleep(PAUSE_S)
                self._surplus = {each for each in self._surplus if not each.is_closing()}
            try:
                connection = await _accepted(listener)
            except OSError as error:
                logger.warning("cannot accept a connection: %s; trying again in %g s", error.strerror, REPORT_S)
                await asyncio.sleep(REPORT_S)
                continue
            await self._let_in(connection)

    async def _let_in(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        is_surplus = connection.fileno() >= self._places.num_shared
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: Connection(server, self._limits), connection)
        except OSError:  # it has gone already
            connection.close()
            return
        if is_surplus:
            self._surplus.add(transport)
            loop.call_later(SURPLUS_S, transport.abort)
            self._report()

    def _report(self) -> None:
        self._num_surplus += 1
        now_s = time.monotonic()
        if now_s - self._reported_s > REPORT_S:
            logger.warning("%d connections beyond %d descriptors were refused; raise `ulimit -n` or start more routers",
                           self._num_surplus, self._places.num_shared)  # fmt: skip
            self._num_surplus, self._reported_s = 0, now_s


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next connection; of several that wait already, each costs less than to be told of it."""
    try:
        connection, _ = listener.accept()
        connection.setblocking(False)
    except BlockingIOError:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return connection


async def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, which is all of the machine if empty; raises OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except UnicodeError:
        raise OSError(errno.EINVAL, "no name of a host") from None
    listeners: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            listeners.append(socket.create_server(address[:2], family=family, backlog=BACKLOG))
            listeners[-1].setblocking(False)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
