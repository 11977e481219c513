"""Admission of connections, bounded by file descriptors; some descriptors are kept for the router itself.

The kernel gives out the lowest free descriptor, so a connection's number says how many are taken. Connections below the
limit may stay. The next few are surplus: completions are refused with 429, so clients learn the reason, and the
connection closes after an answer. All others wait in the kernel's queue without a descriptor. Silent connections,
longest first, are closed to make room.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from typing import NamedTuple

from aiohttp import web

from common.base.errors import ConfigError
from common.serving.worker.settle import raise_open_files
from common.settings.config import RouterSection
from router.dispatch.waiting_queue import busy
from router.http.connection import Connection
from router.http.unread_answers import Unread
from router.workers.membership import MAX_WORKERS

logger = logging.getLogger(__name__)

LEAST_OPEN_FILES = 256
NUM_SURPLUS = 64
NUM_KEPT = NUM_SURPLUS + 2 * MAX_WORKERS + 64
"""Not for clients: surplus connections, two per worker, files, pipes; at most a quarter of all."""
SURPLUS_S = 5.0
"""Time for a surplus connection to ask and to be answered."""
SILENT_S = 0.5
"""Time for a connection's first request, while others wait."""
PAUSE_S = 0.02
REPORT_S = 1.0
BACKLOG = 2048
"""Connections waiting to be accepted; a full queue costs a SYN retry, 1 s of TTFT."""


class Places(NamedTuple):
    """Numbers of descriptors, from the lowest on."""

    num_shared: int  # shared by the router and clients
    num_surplus: int  # next, for surplus connections; the rest is the router's own


PLACES = web.AppKey("places", Places)


def open_places() -> Places:
    """Return the places of the process with its limit raised; raise ConfigError for too few."""
    num_open = raise_open_files()
    if num_open < LEAST_OPEN_FILES:
        raise ConfigError(f"{num_open} open files are allowed: at least {LEAST_OPEN_FILES}; raise `ulimit -n`")
    num_kept = min(NUM_KEPT, num_open // 4)
    places = Places(num_open - num_kept, min(NUM_SURPLUS, num_kept // 2))
    logger.info("%d open files are allowed: up to %d connections of clients, then 429", num_open, places.num_shared)
    return places


def refuse_surplus(request: web.Request) -> None:
    """Raise RequestError (429) for a request on a surplus connection."""
    if is_surplus(request):
        raise busy(f"all {request.app[PLACES].num_shared} connections are taken")


def is_surplus(request: web.Request) -> bool:
    """Tell whether the request's connection must close after an answer."""
    connection = request.get_extra_info("socket")
    return connection is not None and connection.fileno() >= request.app[PLACES].num_shared


class Door(web.BaseSite):
    """Acceptor of connections on bound sockets, during the life of the runner."""

    def __init__(
        self,
        runner: web.AppRunner,
        listeners: list[socket.socket],
        places: Places,
        limits: RouterSection,
        unread: Unread,
    ) -> None:
        super().__init__(runner)
        self._limits = limits
        self._unread = unread
        self.own_listeners = listeners
        self._shared: list[socket.socket] = []
        self._places = places
        self._surplus: set[Connection] = set()
        self._num_surplus = self._num_silent = 0  # since the last report
        self._reported_s = 0.0
        self._accepting: list[asyncio.Task[None]] = []
        self._accepting_shared: list[asyncio.Task[None]] = []
        self._port: int = listeners[0].getsockname()[1]

    @property
    def name(self) -> str:
        return f"port {self.port}"

    @property
    def port(self) -> int:
        """Port of the first address."""
        return self._port

    @property
    def num_shared(self) -> int:
        """Number of listeners shared with other processes."""
        return len(self._shared)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def is_busy(self) -> bool:
        """True while any request is read or answered."""
        return any(connection.is_busy for connection in self._connections)

    @property
    def _connections(self) -> list[Connection]:
        server = self._runner.server
        return [each for each in server.connections if isinstance(each, Connection)] if server else []

    async def start(self, *, accepts: bool = True) -> None:
        """Register with the runner; accept connections now, or else from `accept` on."""
        await super().start()
        if accepts:
            self.accept()

    def accept(self) -> None:
        """Accept connections of the door's own listeners."""
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

    async def _accept_forever(self, listener: socket.socket) -> None:
        while True:
            while len(self._surplus) >= self._places.num_surplus:
                self._make_room()
                await asyncio.sleep(PAUSE_S)
                self._surplus = {each for each in self._surplus if not each.is_over}
            try:
                connection = await _accepted(listener)
            except OSError as error:
                logger.warning("cannot accept a connection: %s; trying again in %g s", error.strerror, REPORT_S)
                await asyncio.sleep(REPORT_S)
                continue
            # Shielded, because an accepted connection is served even after the door stops accepting.
            await asyncio.shield(self._let_in(connection))

    async def _let_in(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        if connection.fileno() >= self._places.num_shared and self._make_room():
            await asyncio.sleep(PAUSE_S)  # descriptors come free meanwhile
            connection = _moved(connection)
        is_surplus = connection.fileno() >= self._places.num_shared
        try:
            transport, accepted = await loop.connect_accepted_socket(
                lambda: Connection(server, self._limits, self._unread), connection
            )
        except OSError:  # the client has gone already
            connection.close()
            return
        if is_surplus:
            self._surplus.add(accepted)
            loop.call_later(SURPLUS_S, transport.abort)
            self._num_surplus += 1
            self._report()

    def _make_room(self) -> int:
        """Close silent connections, and return how many.

        All silent surplus connections close, and up to `num_surplus` others, longest silent first.
        """
        server, now_s = self._runner.server, asyncio.get_running_loop().time()
        assert server is not None
        silences_s = {each: each.silence_s(now_s) for each in server.connections if isinstance(each, Connection)}
        silent = [each for each, silence_s in silences_s.items() if silence_s > SILENT_S]
        others = sorted(
            (each for each in silent if each not in self._surplus), key=silences_s.__getitem__, reverse=True
        )
        leaving = [*self._surplus.intersection(silent), *others[: self._places.num_surplus]]
        for each in leaving:
            each.force_close()
        self._num_silent += len(leaving)
        self._report()
        return len(leaving)

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s > REPORT_S and (self._num_surplus or self._num_silent):
            logger.warning("%d connections beyond %d descriptors were refused, %d without a request closed; raise "
                           "`ulimit -n` or start more routers",
                           self._num_surplus, self._places.num_shared, self._num_silent)  # fmt: skip
            self._num_surplus = self._num_silent = 0
            self._reported_s = now_s


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
    """Return a listening socket for each address of `host`; an empty host means all. Raises OSError."""
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
