"""Admission of connections, bounded by file descriptors; some descriptors are kept for the router itself.

The kernel gives out the lowest free descriptor, so a connection's number says how many are taken. Connections below the
limit may stay. The next few are surplus: completions are refused with 429, so clients learn the reason, and the
connection closes after an answer. All others wait in the kernel's queue without a descriptor. Silent connections,
longest first, are closed to make room.
"""

import asyncio
import logging
import time
from typing import NamedTuple

from aiohttp import web

from common.base.errors import ConfigError
from common.base.process import raise_open_files
from common.wire.messages.operator import MAX_WORKERS
from router.dispatch.room import busy
from router.http.connection import Connection

logger = logging.getLogger(__name__)

LEAST_OPEN_FILES = 256
NUM_SURPLUS = 64
NUM_KEPT = NUM_SURPLUS + 2 * MAX_WORKERS + 64
"""Not for clients: surplus connections, two per worker, files, pipes; at most a quarter of all."""
SILENT_S = 0.5
"""Time for a connection's first request, while others wait."""
REPORT_S = 1.0
CHECKED_A_TURN = 256
"""Connections checked in a turn of the event loop."""


class DescriptorLimits(NamedTuple):
    """Numbers of descriptors, from the lowest on."""

    num_shared: int  # shared by the router and clients
    num_surplus: int  # next, for surplus connections; the rest is the router's own


DESCRIPTOR_LIMITS = web.AppKey("descriptor_limits", DescriptorLimits)


def descriptor_limits() -> DescriptorLimits:
    """Raise the limit of the process, and return the descriptors for connections; raise ConfigError for too few."""
    num_open = raise_open_files()
    if num_open < LEAST_OPEN_FILES:
        raise ConfigError(f"{num_open} open files are allowed: at least {LEAST_OPEN_FILES}; raise `ulimit -n`")
    num_kept = min(NUM_KEPT, num_open // 4)
    limits = DescriptorLimits(num_open - num_kept, min(NUM_SURPLUS, num_kept // 2))
    logger.info("%d open files are allowed: up to %d connections of clients, then 429", num_open, limits.num_shared)
    return limits


def refuse_surplus(request: web.Request) -> None:
    """Raise RequestError (429) for a request on a surplus connection."""
    if is_surplus(request):
        raise busy(f"all {request.app[DESCRIPTOR_LIMITS].num_shared} connections are taken")


def is_surplus(request: web.Request) -> bool:
    """Tell whether the request's connection must close after an answer."""
    connection = request.get_extra_info("socket")
    return connection is not None and connection.fileno() >= request.app[DESCRIPTOR_LIMITS].num_shared


class Connections:
    """Open connections of a runner; silent connections are closed to make room."""

    def __init__(self, runner: web.AppRunner, descriptors: DescriptorLimits) -> None:
        self._runner, self._descriptors = runner, descriptors
        self._surplus: set[Connection] = set()
        self._num_surplus = self._num_silent = 0  # since the last report
        self._reported_s = 0.0

    def __len__(self) -> int:
        return len(self._open())

    @property
    def is_busy(self) -> bool:
        """True while any request is read or answered."""
        return any(connection.is_busy for connection in self._open())

    def _open(self) -> list[Connection]:
        server = self._runner.server
        return [each for each in server.connections if isinstance(each, Connection)] if server else []

    async def check(self) -> None:
        """End waits over their limits, and give way to streams meanwhile."""
        now_s = asyncio.get_running_loop().time()
        for number, each in enumerate(self._open(), start=1):
            each.check(now_s)
            if number % CHECKED_A_TURN == 0:
                await asyncio.sleep(0)

    def add_surplus(self, connection: Connection) -> None:
        self._surplus.add(connection)
        self._num_surplus += 1
        self._report()

    @property
    def are_too_many(self) -> bool:
        """True while all surplus descriptors are taken."""
        return len(self._surplus) >= self._descriptors.num_surplus

    def forget_closed(self) -> None:
        self._surplus = {each for each in self._surplus if not each.is_over}

    def close_silent(self) -> int:
        """Close silent connections to make room, and return how many.

        All silent surplus connections close, and up to `num_surplus` others, longest silent first.
        """
        now_s = asyncio.get_running_loop().time()
        silences_s = {each: each.silence_s(now_s) for each in self._open()}
        silent = [each for each, silence_s in silences_s.items() if silence_s > SILENT_S and not each.has_unread]
        others = sorted(
            (each for each in silent if each not in self._surplus), key=silences_s.__getitem__, reverse=True
        )
        leaving = [*self._surplus.intersection(silent), *others[: self._descriptors.num_surplus]]
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
                           self._num_surplus, self._descriptors.num_shared, self._num_silent)  # fmt: skip
            self._num_surplus = self._num_silent = 0
            self._reported_s = now_s
