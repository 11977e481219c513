"""Handover of the HTTP port: from a running router to a new router, and on to the next.

With `router.take_over`, a router starts beside the router on the port. Once ready, the new router accepts connections
and tells the old router, which finishes open requests and ends. Alternatively, a separate process only holds the port
and outlives all routers.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from common.base.errors import ConfigError
from common.settings.config import RouterSection
from common.wire.transport.endpoints import private_directory
from common.wire.transport.port_sharing import PortLoan, PortOffer, borrow
from router.base.shapes import StatusName
from router.http.acceptor import Acceptor

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Value of `router.take_over`: take over from the same user's router."""
POLL_S = 0.1
SETTLING_S = 5.0
"""Time after which a degraded router takes the port; startup is over by then."""
QUIET_S = 2.0
"""Time without any request before a leaving router closes idle connections."""


class Succession:
    """Handover of the port; `relieved` is set once another router has the port.

    Args:
        status: returns the state of the system.
    """

    def __init__(self, section: RouterSection, status: Callable[[], StatusName]) -> None:
        self._section, self._status = section, status
        self.relieved, self.has_port = asyncio.Event(), asyncio.Event()
        self.is_leaving = False
        self._acceptor: Acceptor | None = None
        self._offer: PortOffer | None = None
        self._loan: PortLoan | None = None
        self._task: asyncio.Task[None] | None = None

    async def listeners(self) -> list[socket.socket] | None:
        """Return listeners borrowed from the router with the port, or None; accept nothing before the takeover."""
        if self._section.take_over == AUTO:
            self._loan = await borrow(port_path(self._section.port))
        return self._loan.listeners if self._loan else None

    async def begin(self, acceptor: Acceptor) -> None:
        """Begin to take, share or offer the port; call once the acceptor exists."""
        self._acceptor = acceptor
        if self._loan is not None:
            logger.info("port %d is another router's until requests are answered here", acceptor.port)
            self._task = asyncio.create_task(self._take(self._loan))
        elif self._section.take_over not in ("", AUTO):
            self._task = asyncio.create_task(self._keep_taking(Path(self._section.take_over)))
        else:
            self._begin_offer()

    @property
    def has_successor(self) -> bool:
        """True if connections not accepted here wait for, or go to, another router."""
        return self.relieved.is_set() or (self._acceptor is not None and self._acceptor.num_shared > 0)

    async def leave(self) -> None:
        """Accept no more connections; each open connection still gets a last answer."""
        assert self._acceptor is not None
        self.is_leaving = True
        self._acceptor.release()
        if self._offer is not None:
            await self._offer.close()

    async def quiet(self) -> None:
        """Wait until no connection had a request for `QUIET_S`, or none is left."""
        assert self._acceptor is not None
        since_s = time.monotonic()
        while self._acceptor.connections and time.monotonic() - since_s < QUIET_S:
            await asyncio.sleep(POLL_S)
            if self._acceptor.connections.is_busy:
                since_s = time.monotonic()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._offer is not None:
            await self._offer.close()
        if self._loan is not None:
            self._loan.close()

    async def _take(self, loan: PortLoan) -> None:
        """Take the port over from another router."""
        assert self._acceptor is not None
        await self._until_ready()
        self._acceptor.accept()
        await loan.take()
        logger.info("port %d is taken over", self._acceptor.port)
        self._begin_offer()

    async def _keep_taking(self, path: Path) -> None:
        """Share the port of a holder process, again after each restart of the holder."""
        assert self._acceptor is not None
        while True:
            await self._until_ready()
            loan = await borrow(path)
            if loan is None:
                await asyncio.sleep(POLL_S)
                continue
            self._acceptor.share(loan.listeners)
            self.has_port.set()
            logger.info("the port of %s is served, too", path)
            with contextlib.closing(loan):
                await loan.ended()
            self._acceptor.unshare()
            logger.warning("nobody holds the port of %s any more; waiting for it", path)

    async def _until_ready(self) -> None:
        since_s = 0.0
        while (status := self._status()) != "ok":
            now_s = time.monotonic()
            since_s = (since_s or now_s) if status == "degraded" else 0.0
            if since_s and now_s - since_s >= SETTLING_S:
                return
            await asyncio.sleep(POLL_S)

    def _begin_offer(self) -> None:
        """Offer the port to a next router; after a failure the router serves without an offer."""
        assert self._acceptor is not None
        self.has_port.set()
        self._offer = PortOffer(port_path(self._acceptor.port), self._acceptor.own_listeners, self.relieved.set)
        try:
            self._offer.start()
        except (ConfigError, OSError) as error:
            logger.info("no other router can take port %d over: %s", self._acceptor.port, error)


SUCCESSION = web.AppKey("succession", Succession)


def port_path(port: int) -> Path:
    """Return the path of the socket at which a router of the user hands on a port."""
    return private_directory() / f"port-{port}.sock"
