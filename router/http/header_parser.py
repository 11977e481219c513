"""aiohttp's HTTP parser, with a limit for all headers of a request together, and an end for broken bodies."""

import asyncio
from collections.abc import Sequence
from typing import Never

from aiohttp import hdrs, web
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE

from router.http.errors import MAX_HEADERS, MAX_LINE_BYTES, from_parser

CONTINUE = "100-continue"


class HeaderParser(HttpRequestParser):
    """Parser of all input of a connection."""

    def __init__(self, protocol: web.RequestHandler, max_bytes: int, buffer_bytes: int) -> None:
        super().__init__(
            protocol,
            asyncio.get_running_loop(),
            buffer_bytes,
            max_line_size=min(MAX_LINE_BYTES, max_bytes),
            max_field_size=min(MAX_LINE_BYTES, max_bytes),
            max_headers=MAX_HEADERS,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,  # a few compressed bytes could become very many
            max_msg_queue_size=MAX_MSG_QUEUE_SIZE,
        )
        self.num_begun_bytes = 0
        """Bytes of headers begun and not ended."""
        self.begun_s = self.silent_since_s = asyncio.get_running_loop().time()
        """Times of the headers' first byte, and of the opening or the last response."""
        self.num_unanswered, self.has_messages = 0, False
        self.error: HttpProcessingError | None = None
        """Error raised by the next `feed_data`."""
        self._connection = protocol
        self._max_bytes = max_bytes
        self._body: StreamReader | None = None

    def feed_data(  # type: ignore[override]  # the C parser takes fewer arguments than the Python parser
        self, data: bytes
    ) -> tuple[Sequence[tuple[RawRequestMessage, StreamReader]], bool, bytes]:
        """Return the messages completed by `data`; raise HttpProcessingError."""
        if self.error is not None:
            raise self.error
        is_header = self._is_body_over()
        try:
            messages, upgraded, tail = super().feed_data(data)
        except HttpProcessingError as error:
            if self._is_body_over():
                raise
            return self._end_body(error)
        if messages:
            self._body, self.num_begun_bytes = messages[-1][1], 0
            for message, _ in messages:
                self._check(message)
            self.num_unanswered, self.has_messages = self.num_unanswered + len(messages), True
        elif is_header and data:
            if not self.num_begun_bytes:
                self.begun_s = asyncio.get_running_loop().time()
            self.num_begun_bytes += len(data)
            self._check_size(self.num_begun_bytes)
        return messages, upgraded, tail

    def answered(self) -> None:
        """Count a response."""
        self.num_unanswered -= 1
        self.silent_since_s = asyncio.get_running_loop().time()

    def _check(self, message: RawRequestMessage) -> None:
        self._check_size(len(message.path) + sum([len(name) + len(value) for name, value in message.raw_headers]))
        if message.headers.get(hdrs.EXPECT, CONTINUE).lower() != CONTINUE:
            text = f"the only Expect header understood is {CONTINUE}; leave it out"
            raise HttpProcessingError(code=417, message=text)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            text = f"the headers have more than router.max_header_bytes = {self._max_bytes} bytes; send less"
            raise HttpProcessingError(code=431, message=text)

    def _is_body_over(self) -> bool:
        return self._body is None or self._body.is_eof()

    def _end_body(self, error: HttpProcessingError) -> tuple[Sequence[Never], bool, bytes]:
        """Raise the error in the body's reader, because aiohttp does not, and close the connection.

        Input behind a broken body cannot be read.
        """
        assert self._body is not None
        self._body.set_exception(web.RequestPayloadError(from_parser(error).message))
        self._connection.close()
        return (), False, b""
