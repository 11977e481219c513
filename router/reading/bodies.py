"""Incoming HTTP bodies: bounds on the size, time, number and bytes held.

A body counts from the first byte until its request has been read. The first `NUM_FREE_BYTES` of each body are free. So
large and slow bodies may keep out each other, but never a short request.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import hdrs, web

from common.base.errors import RequestError
from common.base.process import trim_memory
from common.settings.config import RouterSection
from router.dispatch.room import busy

NUM_FREE_BYTES = 32_768
SLOW_S = 1.0
"""Age at which a body makes room for the next, if too many are open."""
TRIMMED_BYTES = 4 << 20
"""Bytes of released bodies before memory is trimmed, because trimming takes long."""


class Body:
    """A body in received pieces, complete once `receive` has returned."""

    def __init__(self, bodies: "Bodies") -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self.makes_room = False  # refused, to make room for another body
        self._bodies = bodies

    @property
    def num_counted(self) -> int:
        """Bytes held beyond the free bytes."""
        return max(0, self.num_bytes - NUM_FREE_BYTES)

    async def receive(self, request: web.Request) -> None:
        """Read the whole body; raise RequestError if too large, too slow, compressed or broken."""
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
        if encoding != "identity":
            message = f"content encoding {encoding[:80]!r}: send the JSON as it is"
            raise RequestError(message, code="unsupported_media_type", status=415)
        self._bodies.check(self, request.content_length or 0)
        timeout_s = self._bodies.timeout_s
        try:
            if request.content.is_eof():  # came with its headers, like most
                await self._collect(request)
                return
            async with asyncio.timeout(timeout_s) as timeout:
                with self._bodies.coming(self, timeout):
                    await self._collect(request)
        except TimeoutError:
            if self.makes_room:
                raise busy("its room was wanted, and this body comes slowly") from None
            message = f"the body did not arrive within router.body_timeout_s = {timeout_s:g} s"
            raise RequestError(message, code="request_timeout", status=408) from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the body is broken: {error!s:.100}", code="invalid_request") from None

    async def _collect(self, request: web.Request) -> None:
        while piece := await request.content.readany():
            self._bodies.check(self, self.num_bytes + len(piece))
            self._bodies.num_counted -= self.num_counted
            self.pieces.append(piece)
            self.num_bytes += len(piece)
            self._bodies.num_counted += self.num_counted


class Bodies:
    """All bodies held; `num_counted` is the sum over all bodies."""

    def __init__(self, limits: RouterSection) -> None:
        self.num_open = 0
        self.num_counted = 0
        self.timeout_s = limits.body_timeout_s
        self._limits = limits
        self._coming: dict[Body, tuple[float, asyncio.Timeout]] = {}  # begin of arrival, earliest first
        self._num_freed = 0

    @contextmanager
    def hold(self) -> Iterator[Body]:
        """Yield a body to receive; the end of the block releases the body."""
        if self.num_open >= self._limits.max_requests and not self._make_room():
            raise busy(f"{self.num_open} requests being read, limit {self._limits.max_requests}")
        body = Body(self)
        self.num_open += 1
        try:
            yield body
        finally:
            self.num_open -= 1
            self.num_counted -= body.num_counted
            body.pieces.clear()
            self._num_freed += body.num_counted
            if not self.num_counted and self._num_freed > TRIMMED_BYTES:
                self._num_freed = 0
                trim_memory()

    @contextmanager
    def coming(self, body: Body, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count the body as arriving during the block."""
        self._coming[body] = time.monotonic(), timeout
        try:
            yield
        finally:
            self._coming.pop(body, None)

    def _make_room(self) -> bool:
        """Refuse the body arriving for the longest time, if slow; return whether room was made.

        The refused body ends in the loop's next turn.
        """
        for body, (since_s, timeout) in self._coming.items():
            if time.monotonic() - since_s < SLOW_S:
                return False
            del self._coming[body]
            if not timeout.expired():
                body.makes_room = True
                timeout.reschedule(asyncio.get_running_loop().time())
            return True
        return False

    def check(self, body: Body, num_bytes: int) -> None:
        """Raise RequestError unless `body` may have `num_bytes`: 413 if never, 429 if not now."""
        limits = self._limits
        if num_bytes > limits.max_body_bytes:
            message = f"the body is larger than router.max_body_bytes = {limits.max_body_bytes}; split the request"
            raise RequestError(message, code="request_too_large", status=413)
        num_others = self.num_counted - body.num_counted
        if num_bytes > NUM_FREE_BYTES and num_others + num_bytes > limits.max_bodies_bytes:
            raise busy(f"{num_others} bytes of long requests being read, limit {limits.max_bodies_bytes}")
