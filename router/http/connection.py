"""Client connections: aiohttp's, with errors in OpenAI's shape and an end to every wait.

aiohttp answers unreadable HTTP by itself, outside of middlewares. The parser raises for unreadable HTTP, and
`HeaderParser` also for headers too large or too slow. All such errors lead to a last reply of the connection.
`Connections` calls `check` of every connection again and again.
"""

import asyncio
import fcntl
import logging
import sys
import termios
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from common.base.errors import RequestError
from common.settings.config import RouterSection
from common.settings.limits import DAY_S
from router.dispatch.completion.state import new_response_id
from router.http.errors import error_response, from_parser
from router.http.header_parser import HeaderParser
from router.http.unread_answers import Output, Unread

logger = logging.getLogger(__name__)

SERVER = "baton"
LINGER_S = 2.0
"""Time to discard input after a last reply, because a reset would lose the reply."""


class LastReply(web.Response):
    """The reply to unreadable HTTP; further input is not read."""


class Connection(web.RequestHandler):
    """A client's connection, from the first byte to the last."""

    __slots__ = ("_header_parser", "_limits", "_socket", "address", "output")

    def __init__(self, server: web.Server, limits: RouterSection, unread: Unread | None = None) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=DAY_S,  # `check` closes idle connections
            access_log=None,  # type: ignore[arg-type]
            lingering_time=LINGER_S,
        )
        self._parser = self._header_parser = HeaderParser(self, limits.max_header_bytes, self._read_bufsize)
        self._limits = limits
        self.output = Output(unread or Unread(limits.max_unread_bytes))
        self._socket: asyncio.Transport | None = None  # until lost; `transport` is None while bytes are still sent
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = self.transport
        self.address = self.output.client = str((transport.get_extra_info("peername") or ("",))[0])

    def connection_lost(self, exc: BaseException | None) -> None:
        self._socket = None
        self.output.resume()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch a full write buffer, because the client reads slowly or not at all."""
        super().pause_writing()
        self.output.pause(self._socket)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.output.resume()

    @property
    def is_over(self) -> bool:
        """True if the connection takes no more requests."""
        return self.transport is None or self.transport.is_closing()

    @property
    def is_busy(self) -> bool:
        """True while a request of the connection is read or answered."""
        return self._header_parser.num_unanswered > 0 or self._header_parser.num_begun_bytes > 0

    @property
    def has_unread(self) -> bool:
        """True while bytes of the client have come that the event loop has not read, because it is busy."""
        if self._socket is None:
            return False
        count = fcntl.ioctl(self._socket.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(count, sys.byteorder) > 0

    def silence_s(self, now_s: float) -> float:
        """Return the seconds without a whole request, since opening or the last response; 0 during a request."""
        parser = self._header_parser
        return 0.0 if parser.num_unanswered else now_s - parser.silent_since_s

    def check(self, now_s: float) -> None:
        """End a wait for headers or for the next request, and watch a closing connection's unread bytes.

        A client without any header byte gets no reply.
        """
        parser, limits = self._header_parser, self._limits
        if self.is_over:
            self.output.watch(self._socket)  # all buffered bytes are sent first, if the client ever reads
        elif parser.num_begun_bytes and now_s - parser.begun_s > limits.header_timeout_s:
            text = f"the headers did not arrive within router.header_timeout_s = {limits.header_timeout_s:g} s"
            parser.error = HttpProcessingError(code=408, message=text)
            self.data_received(b"")
        elif not parser.num_begun_bytes:
            idle_s = limits.keepalive_s if parser.has_messages else limits.header_timeout_s
            if self.silence_s(now_s) > idle_s:
                self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of a response; return the response and whether the client is gone.

        After a last reply, wait until the client has read it and closed, for `LINGER_S` at most.
        """
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if not isinstance(resp, LastReply):
                self._header_parser.answered()
            elif self.transport is not None and self.transport.can_write_eof():
                self.close()  # further input is not read as HTTP
                self.transport.write_eof()
                await asyncio.sleep(LINGER_S)  # cancelled when the connection is lost

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
        is_unreadable = isinstance(exc, HttpProcessingError)
        if isinstance(exc, HttpProcessingError):
            error = from_parser(exc)
            logger.debug("refused what %s sent: %d %s", request.remote, error.status, error.code)
        else:
            logger.error("a bug in handling %s %.100s", request.method, request.path, exc_info=exc)
            error = RequestError("internal error", code="internal_error", status=500)
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun: no other can be sent")
        response = error_response(error, LastReply if is_unreadable else web.Response)
        response.headers.update({"X-Request-Id": new_response_id(), "Server": SERVER})
        response.force_close()
        return response

    def log_exception(self, *args: object, **options: Any) -> None:
        """Log an error, except for a broken unread body, which is no news."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            logger.error(*args, **options)


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    assert isinstance(request.protocol, Connection)
    return request.protocol
