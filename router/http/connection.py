"""Client connections: aiohttp's, with errors in OpenAI's shape and an end to every wait.

aiohttp answers unreadable HTTP by itself, outside of middlewares. The parser raises for unreadable HTTP, and
`HeaderParser` also for headers too large or too slow. All such errors lead to a last reply of the connection.
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
"""Time after which a client reading nothing is cut off."""
REST_S = 0.25
"""Time between two writes of a stream to a slow client."""
SERVER = "baton"
LINGER_S = 2.0
"""Time to discard input after a last reply, because a reset would lose the reply."""


class Connection(web.RequestHandler):
    """A client's connection, from the first byte to the last."""

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
        """Client charged for unread bytes: the address, or the client named by a request."""

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
        """Note a full write buffer, because the client reads slowly or not at all."""
        super().pause_writing()
        self._is_writable.clear()
        if self.transport is not None:
            self._watch(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_waiting()

    @property
    def is_busy(self) -> bool:
        """True while a request of the connection is read or answered."""
        return self._current_request is not None or self._header_parser.num_begun_bytes > 0

    async def write(self, request: web.Request, data: bytes) -> None:
        """Write to a response without waiting for the client, because unread bytes have separate bounds.

        Raises ConnectionError when the client is gone.
        """
        writer = request.writer
        assert isinstance(writer, StreamWriter)
        num_before = writer.output_size
        await writer.write(data, drain=False)
        if self._waiting is not None:
            self._waiting.num_left += writer.output_size - num_before

    async def rest(self) -> None:
        """Wait until the client has read most pending bytes, for `REST_S` at most.

        Deliveries gather meanwhile, so fewer events follow.
        """
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
        """True if the connection takes no more requests."""
        return self.transport is None or self.transport.is_closing()

    def silence_s(self, now_s: float) -> float:
        """Return the seconds without a whole request, since opening or the last response; 0 during a request."""
        return 0.0 if self._waiter is None or self._messages else now_s - self._silent_since_s

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def _watch_headers(self) -> None:
        """Time headers from beginning to end; call after any parsing of headers."""
        if self._is_lost or not self._header_parser.num_begun_bytes:
            self._stop_timing()
        elif self._header_timer is None:
            self._time_headers()

    def _watch_closing(self, transport: asyncio.Transport, _: "asyncio.Task[None]") -> None:
        """Watch a closing transport, because all buffered bytes are sent first, if the client ever reads."""
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
        """Refuse headers after a timeout; a client without any header byte gets no reply."""
        self._header_timer = None
        if not self._header_parser.num_begun_bytes:
            self.force_close()
            return
        text = f"the headers did not arrive within router.header_timeout_s = {self._header_timeout_s:g} s"
        self._header_parser.error = HttpProcessingError(code=408, message=text)
        super().data_received(b"")

    def _process_keepalive(self) -> None:
        if self._header_parser.num_begun_bytes:
            self._keepalive_handle = None  # no longer idle; the headers' own timer runs
        else:
            super()._process_keepalive()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of a response; return the response and whether the client is gone."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._silent_since_s = self._loop.time()
            self._watch_headers()  # headers may follow a declined upgrade

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the reply to unreadable HTTP, or to a failed handler without a begun response.

        Raises ConnectionError if a response has begun.
        """
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
        """Log an error, except for a broken unread body, which is no news."""
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
        """Wait until the client has read the reply and closed, for `LINGER_S` at most."""
        self.close()  # further input is not read as HTTP
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()
            await asyncio.sleep(LINGER_S)  # cancelled when the connection is lost


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    assert isinstance(request.protocol, Connection)
    return request.protocol


def _reply(error: RequestError) -> web.Response:
    response = error_response(error)
    response.headers.update({"X-Request-Id": new_response_id(), "Server": SERVER})
    return response
