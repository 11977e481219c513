"""Raw sockets: whatever is sent, an error has OpenAI's shape, and nobody holds a connection without using it."""

import asyncio
import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from common.settings.config import RouterSection
from router.http import unread_answers
from router.http.connection import Connection
from router.reading import bodies
from tests.router.conftest import Cluster, StartCluster

DEADLINE_S = 60.0
HOST = b"Host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GZIP = POST + b"Content-Encoding: gzip\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"

MALFORMED: list[tuple[str, bytes, int, str]] = [
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400, "invalid_request"),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_request"),
    ("version", b"GET / HTTP/9.9\r\n" + HOST + b"\r\n", 400, "invalid_request"),
    ("method", b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_request"),
    ("url", b"GET http://[::1/ HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_request"),
    ("no host", b"GET /live HTTP/1.1\r\n\r\n", 400, "invalid_request"),
    ("NUL", b"GET /live HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400, "invalid_request"),
    ("two lengths", POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400, "invalid_request"),
    ("huge length", POST + b"Content-Length: 99999999999999999999999\r\n\r\nab", 400, "invalid_request"),
    ("smuggling", POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_request"),
    ("chunk", CHUNKED + b"zz\r\n\r\n", 400, "invalid_request"),
    ("strange expect", POST + b"Expect: \xff\r\n\r\n", 417, "expectation_failed"),
    ("expect", POST + b"Expect: tea\r\nConnection: close\r\n\r\n", 417, "expectation_failed"),
    ("compressed", GZIP + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}", 415, "unsupported_media_type"),
    ("long line", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431, "headers_too_large"),
    ("huge line", b"GET /" + b"a" * 9_000_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431, "headers_too_large"),
    ("long header", b"GET /live HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431, "headers_too_large"),
    ("many headers", b"GET /live HTTP/1.1\r\n" + b"X: a\r\n" * 300 + b"\r\n", 431, "headers_too_large"),
    ("large headers", LIVE[:-2] + (b"X: " + b"a" * 7000 + b"\r\n") * 6 + b"\r\n", 431, "headers_too_large"),
    ("trailers", CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 1000 + b"\r\n", 431, "headers_too_large"),
]  # fmt: skip


class Socket:
    """A connection to a cluster."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, *pieces: bytes) -> bytes:
        """Send, then read until the server closes."""
        async with asyncio.timeout(DEADLINE_S):
            for piece in pieces:
                self.writer.write(piece)
                await asyncio.sleep(0.01)
            data = await self.reader.read(-1)
        return data

    async def response(self) -> tuple[int, bytes]:
        """Status and body of one response with a length."""
        async with asyncio.timeout(DEADLINE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return int(head.split()[1]), await self.reader.readexactly(length)


Connect = Callable[[Cluster], Awaitable[Socket]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens connections, which are closed in the end."""
    opened: list[Socket] = []

    async def connect(cluster: Cluster) -> Socket:
        host, port = cluster.url.removeprefix("http://").split(":")
        opened.append(Socket(*await asyncio.open_connection(host, int(port))))
        return opened[-1]

    yield connect
    for socket in opened:
        socket.writer.transport.abort()


def error_of(data: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of the one response in `data`, whose shape is right."""
    head, body = data.split(b"\r\n\r\n", 1)
    assert b"Content-Type: application/json" in head
    assert b"X-Request-Id: " in head and b"aiohttp" not in head
    content = json.loads(body)
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 300 and "Traceback" not in error["message"]
    return int(head.split()[1]), error


@pytest.mark.parametrize(("data", "status", "code"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED])
async def test_what_is_not_understood_is_refused_in_the_one_shape(
    start_cluster: StartCluster, connect: Connect, data: bytes, status: int, code: str
) -> None:
    cluster = await start_cluster()
    found, error = error_of(await (await connect(cluster)).ask(data))
    assert (found, error["code"]) == (status, code)
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/live") as response:
        assert response.status == 200


@pytest.mark.parametrize(("start", "status"), [(CHUNKED, 400), (CHUNKED.replace(b"completions", b"models"), 405)])
async def test_a_body_that_breaks_later_ends_its_connection_after_one_answer(
    start_cluster: StartCluster, connect: Connect, caplog: pytest.LogCaptureFixture, start: bytes, status: int
) -> None:
    cluster = await start_cluster()
    found, error = error_of(await (await connect(cluster)).ask(start, b"2\r\n{", b"}\r\nzz\r\n", LIVE))
    assert found == status
    assert ("chunk size" in error["message"]) == (status == 400)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_headers_count_together_however_they_come(start_cluster: StartCluster, connect: Connect) -> None:
    cluster = await start_cluster(max_header_bytes=1024)
    begun = b"GET /live HTTP/1.1\r\n" + HOST
    pieces = [b"X: " + b"a" * 95 + b"\r\n"] * 12
    status, error = error_of(await (await connect(cluster)).ask(begun, *pieces))
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "router.max_header_bytes = 1024" in error["message"]
    end = b"Connection: close\r\n\r\n"
    assert b" 200 OK" in await (await connect(cluster)).ask(begun, *pieces[:8], end)
    assert b" 431 " in await (await connect(cluster)).ask(begun + b"".join(pieces) + end)


@pytest.mark.parametrize("path", ["completions", "responses"])
async def test_a_stream_is_framed_as_its_version_of_http_wants(cluster: Cluster, connect: Connect, path: str) -> None:
    prompt = {"prompt": "the fox", "max_tokens": 3} if path == "completions" else {"input": "a", "max_output_tokens": 3}
    body = json.dumps(prompt | {"stream": True}).encode()
    head = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path.encode()
    post = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    behind = LIVE[:-2] + b"Connection: close\r\n\r\n"
    _, data = (await (await connect(cluster)).ask(post + behind)).split(b"\r\n\r\n", 1)
    chunks: list[bytes] = []
    while not chunks or chunks[-1]:
        size, data = data.split(b"\r\n", 1)
        chunks.append(data[: int(size, 16)])
        assert data[int(size, 16) :].startswith(b"\r\n")
        data = data[int(size, 16) + 2 :]
    assert chunks[:-1] and all(chunk.endswith(b"\n\n") for chunk in chunks[:-1])
    assert data.startswith(b"HTTP/1.1 200 OK"), "the next answer follows the stream's one end"
    plain = await (await connect(cluster)).ask(post.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"Transfer-Encoding" not in plain and plain.endswith(b"}\n\n" if path == "responses" else b"[DONE]\n\n")
    assert plain.count(b"\r\n") == plain.split(b"\r\n\r\n")[0].count(b"\r\n") + 2, "no chunks"


UPGRADE = LIVE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.medium
async def test_headers_behind_an_upgrade_that_is_declined_end_too(
    start_cluster: StartCluster, connect: Connect
) -> None:
    cluster = await start_cluster(header_timeout_s=1.5, keepalive_s=1.0)
    answer = await (await connect(cluster)).ask(UPGRADE + b"GET /live HTTP/1.1\r\n")
    assert answer.count(b"HTTP/1.") == 2
    assert b" 408 " in answer


@pytest.mark.medium
@pytest.mark.parametrize("has_asked", [False, True])
async def test_headers_that_never_end_are_told_so(
    start_cluster: StartCluster, connect: Connect, has_asked: bool
) -> None:
    cluster = await start_cluster(header_timeout_s=1.5, keepalive_s=1.0)
    socket = await connect(cluster)
    if has_asked:
        socket.writer.write(LIVE)
        assert (await socket.response())[0] == 200
    status, error = error_of(await socket.ask(b"GET /live HTTP/1.1\r\n"))
    assert (status, error["code"]) == (408, "request_timeout")


async def test_a_body_that_never_ends_is_told_so(start_cluster: StartCluster, connect: Connect) -> None:
    cluster = await start_cluster(body_timeout_s=0.2)
    socket = await connect(cluster)
    socket.writer.write(POST + b"Content-Length: 100\r\n\r\n{")
    status, body = await socket.response()
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


async def test_bodies_that_come_slowly_make_room_for_others(
    start_cluster: StartCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SLOW_S", 0.0)
    cluster = await start_cluster(max_requests=2)
    slow = [await connect(cluster) for _ in range(2)]
    slow[0].writer.write(POST + b"Content-Length: 100\r\n\r\n{")
    await cluster.until(lambda: cluster.service.bodies.num_open == 1, "a body that does not end")
    slow[1].writer.write(POST + b"Content-Length: 100\r\n\r\n{")
    await cluster.until(lambda: cluster.service.bodies.num_open == 2, "another")
    short = await connect(cluster)
    short.writer.write(POST + b"Content-Length: 2\r\n\r\n{}")
    assert (await short.response())[0] == 400, "it is read"
    status, body = await slow[0].response()
    assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert cluster.service.bodies.num_open == 1, "one makes room"


async def test_who_asks_for_nothing_is_let_go(start_cluster: StartCluster, connect: Connect) -> None:
    silent = await start_cluster(header_timeout_s=0.2)
    assert await (await connect(silent)).ask() == b""
    idle = await start_cluster(keepalive_s=0.2)
    answered = await (await connect(idle)).ask(LIVE)
    assert answered.endswith(b'{"status": "ok"}')


@pytest.mark.medium
async def test_who_waits_for_an_answer_is_not(start_cluster: StartCluster, connect: Connect) -> None:
    cluster = await start_cluster(header_timeout_s=0.5, keepalive_s=0.5, body_timeout_s=0.5)
    socket = await connect(cluster)
    body = b'{"prompt": "the fox", "max_tokens": 3}'
    socket.writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await cluster.until(lambda: cluster.service.dispatcher.num_active, "the request")
    await asyncio.sleep(1.0)
    cluster.prefill()
    cluster.decode()
    assert (await socket.response())[0] == 200


PRIVATE = {"_parser", "_read_bufsize"}
"""Names of aiohttp's RequestHandler that `Connection` uses beside the public ones."""
PUBLIC = {
    "connection_made", "connection_lost", "pause_writing", "resume_writing", "finish_response", "handle_error",
    "log_exception",
}  # fmt: skip
"""Methods that `Connection` overrides."""


def test_aiohttp_has_the_private_names_that_are_used() -> None:
    slots = {name for each in web.RequestHandler.__mro__ for name in getattr(each, "__slots__", ())}
    used = set(re.findall(r"self\.(_[a-z]\w*)", inspect.getsource(Connection)))
    own = {name for name in (*Connection.__slots__, *vars(Connection)) if name not in slots}
    assert used - own == PRIVATE, "another private name of aiohttp is used, or one here is used no more"
    assert slots >= PRIVATE, f"aiohttp {aiohttp.__version__} has another RequestHandler: adapt Connection"
    methods = {name for each in web.RequestHandler.__mro__[:-1] for name in vars(each) if name[:2] != "__"}
    assert methods & set(vars(Connection)) == PUBLIC, "other methods of aiohttp are overridden than those named here"


@asynccontextmanager
async def _served(respond: Callable[[web.BaseRequest], Any]) -> AsyncIterator[tuple[web.Server, int]]:
    """Serve connections, which are checked like those of a router; give the port."""
    server, loop = web.Server(respond, handler_cancellation=True), asyncio.get_running_loop()

    async def check() -> None:
        while True:
            await asyncio.sleep(0.05)
            for each in server.connections:
                cast(Connection, each).check(loop.time())

    checking = asyncio.create_task(check())
    listening = await loop.create_server(lambda: Connection(server, RouterSection()), "127.0.0.1", 0)
    try:
        yield server, listening.sockets[0].getsockname()[1]
    finally:
        checking.cancel()
        listening.close()
        await server.shutdown(1.0)


@pytest.mark.parametrize("high_water", [1 << 16, 1 << 30], ids=["while it is written", "while it closes"])
async def test_who_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch, high_water: int) -> None:
    monkeypatch.setattr(unread_answers, "WRITE_S", 0.2)
    has_responded = asyncio.Event()

    async def respond(request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        request.transport.set_write_buffer_limits(high_water)
        response = web.Response(body=bytes(1 << 25))
        response.force_close()
        has_responded.set()
        return response

    async with _served(respond) as (server, port), asyncio.timeout(DEADLINE_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(LIVE)
        await has_responded.wait()
        while server.connections:
            await asyncio.sleep(0.01)
        writer.transport.abort()


@pytest.mark.medium
async def test_who_reads_slowly_gets_all_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_answers, "WRITE_S", 0.5)
    num_bytes, num_read = 1 << 25, 0

    async def respond(request: web.BaseRequest) -> web.Response:
        return web.Response(body=bytes(num_bytes))

    async with _served(respond) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(LIVE)
        await reader.readuntil(b"\r\n\r\n")
        slow_until_s = asyncio.get_running_loop().time() + 3 * unread_answers.WRITE_S
        while piece := await reader.read(min(1 << 16, num_bytes - num_read)):
            num_read += len(piece)
            if asyncio.get_running_loop().time() < slow_until_s:
                await asyncio.sleep(0.01)
        assert num_read == num_bytes
        writer.transport.abort()
