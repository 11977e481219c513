"""A client's connection: aiohttp's, but every error leaves in OpenAI's shape and every wait has an end.

aiohttp answers by itself what it cannot read as HTTP, outside of middlewares. Its parser raises for that, and ours for
headers that are too many bytes or too slow, too: all of these take one way to one reply, the connection's last.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from common.base.errors import RequestError
from common.settings.config import RouterSection
from router.dispatch.request_state import new_response_id
from router.http.error_bodies import error_response
from router.http.errors import from_parser
from router.http.header_parser import HeaderParser
from router.http.unread_answers import Unread, Waiting

if TYPE_CHECKING:
    from aiohttp.web_protocol import _ErrInfo

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""How long a response may wait for its reader, who reads nothing meanwhile."""
REST_S = 0.25
"""Time between two writes of a stream whose client does not read as fast as it comes."""
SERVER = "baton"
LINGER_S = 2.0
"""How long what still comes is thrown away after a last reply: a reset would take the reply with it."""


class Connection(web.RequestHandler):
    """One client's, from its first byte to its last."""

    __slots__ = (
        "_header_parser", "_header_timeout_s", "_header_timer", "_is_lost", "_is_writable", "_silent_since_s",
        "_unread", "_waiting", "address", "client",
    )  # fmt: skip

    def __init__(self, server: web.Server, limits: RouterSection, unread: Unread | None = None) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.keepalive_s,
            access_log=None,  # type: ignore[arg-type]
            lingering_time=LINGER_S,
        )
        self._header_parser = HeaderParser(self, limits.max_header_bytes, self._read_bufsize, self._max_msg_queue_size)
        self._parser = self._header_parser
        self._header_timeout_s = limits.header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_lost = False
        self._silent_since_s = loop.time()
        self._is_writable = asyncio.Event()
        self._unread = unread or Unread(limits.max_unread_bytes)
        self._waiting: Waiting | None = None
        self.address = ""
        self.client = ""
        """Whose unread bytes count together: the address, or whom a request names."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None and self._task_handler is not None
        self._task_handler.add_done_callback(partial(self._watch_closing, self.transport))
        self._is_writable.set()
        self.address = self.client = str((self.transport.get_extra_info("peername") or ("",))[0])
        self._time_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_lost = True
        self._stop_timing()
        self._end_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The transport holds as much as it should: the client reads slowly, or not at all."""
        super().pause_writing()
        self._is_writable.clear()
        if self.transport is not None:
            self._watch(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_waiting()

    @property
    def is_busy(self) -> bool:
        """Whether a request of it is being read or answered."""
        return self._current_request is not None or self._header_parser.num_begun_bytes > 0

    async def write(self, request: web.Request, data: bytes) -> None:
        """Write to a response without waiting for its reader: what is unread has its own bounds.

        Raises ConnectionError when the client is gone.
        """
        writer = request.writer
        assert isinstance(writer, StreamWriter)
        num_before = writer.output_size
        await writer.write(data, drain=False)
        if self._waiting is not None:
            self._waiting.num_left += writer.output_size - num_before

    async def rest(self) -> None:
        """Wait until the client has read most of what there is, but not for long: what comes then is fewer events."""
        if not self._is_writable.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    await self._is_writable.wait()

    def _watch(self, transport: asyncio.Transport) -> None:
        if self._waiting is None:
            self._waiting = self._unread.begin(transport, self.client, WRITE_S)

    def _end_waiting(self) -> None:
        self._is_writable.set()
        if self._waiting is not None:
            self._unread.end(self._waiting)
            self._waiting = None

    @property
    def is_over(self) -> bool:
        """Whether it takes no more requests."""
        return self.transport is None or self.transport.is_closing()

    def silence_s(self, now_s: float) -> float:
        """How long it has been open, or behind its last response, without a whole request; 0 while it has one."""
        return 0.0 if self._waiter is None or self._messages else now_s - self._silent_since_s

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def _watch_headers(self) -> None:
        """Time them from when they begin to when they end; call after everything that may have parsed some."""
        if self._is_lost or not self._header_parser.num_begun_bytes:
            self._stop_timing()
        elif self._header_timer is None:
            self._time_headers()

    def _watch_closing(self, transport: asyncio.Transport, _: "asyncio.Task[None]") -> None:
        """A transport that is closed first sends all it holds, if ever somebody reads it."""
        if not self._is_lost:
            self._watch(transport)

    def _time_headers(self) -> None:
        self._silent_since_s = self._loop.time()
        self._header_timer = self._loop.call_later(self._header_timeout_s, self._end_headers)

    def _stop_timing(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_headers(self) -> None:
        """Headers have taken too long; who sent none at all is not waiting for a reply."""
        self._header_timer = None
        if not self._header_parser.num_begun_bytes:
            self.force_close()
            return
        text = f"the headers did not arrive within router.header_timeout_s = {self._header_timeout_s:g} s"
        self._header_parser.error = HttpProcessingError(code=408, message=text)
        super().data_received(b"")

    def _process_keepalive(self) -> None:
        if self._header_parser.num_begun_bytes:
            self._keepalive_handle = None  # no longer idle: the headers' own time runs
        else:
            super()._process_keepalive()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of a response; (response, whether the client is gone)."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._silent_since_s = self._loop.time()
            self._watch_headers()  # of what came behind an upgrade that was declined

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply to what no handler has seen, or has failed at when its response had begun."""
        if isinstance(exc, HttpProcessingError):
            error = from_parser(exc)
            logger.debug("refused what %s sent: %d %s", request.remote, error.status, error.code)
        else:
            logger.error("a bug in handling %s %.100s", request.method, request.path, exc_info=exc)
            error = RequestError("internal error", code="internal_error", status=500)
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun: no other can be sent")
        response = _reply(error)
        response.force_close()
        return response

    def log_exception(self, *args: object, **options: Any) -> None:
        """Called for a body that broke while nobody read it, too, which is no news."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            logger.error(*args, **options)

    def _make_error_handler(self, err_info: "_ErrInfo") -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
        async def handler(request: web.BaseRequest) -> web.StreamResponse:
            response = self.handle_error(request, err_info.status, err_info.exc, err_info.message)
            await self.finish_response(request, response, None)
            await self._linger()
            return response

        return handler

    async def _linger(self) -> None:
        """Until the client has read the reply and closed, but not for long."""
        self.close()  # what comes is not read as HTTP any more
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()
            await asyncio.sleep(LINGER_S)  # cancelled when the connection is lost


def connection_of(request: web.Request) -> Connection:
    """The client's end of a request."""
    assert isinstance(request.protocol, Connection)
    return request.protocol


def _reply(error: RequestError) -> web.Response:
    response = error_response(error)
    response.headers.update({"X-Request-Id": new_response_id(), "Server": SERVER})
    return response
