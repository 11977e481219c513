"""Broken HTTP, made of right requests: each connection gets whole answers in the one shape, and is let go."""

import asyncio
import contextlib
import json
import logging
import random

import pytest

from tests.router.conftest import Cluster, StartCluster

NUM_CONNECTIONS = 600
NUM_AT_ONCE = 100
DEADLINE_S = 60.0
JSON = b"Content-Type: application/json\r\n"
REQUESTS = [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON + b'Content-Length: 14\r\n\r\n{"prompt": []}',
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    b'5\r\n{"pro\r\n9\r\nmpt":"a"}\r\n0\r\n\r\n',
    b"GET /live HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: keep-alive\r\n\r\n",
    b"GET /v1/models/x%20y HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Content-Encoding: gzip\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nOrigin: https://a\r\nAccess-Control-Request-Method: POST\r\n"
    b"Access-Control-Request-Headers: a-b\r\nX-Request-Id: abc\r\nAuthorization: Bearer x\r\n\r\n",
]
PIECES = [
    b"\r\n", b"\n", b"\r", b":", b" ", b";", b"%", b"\x00", b"\xff", b"0\r\n\r\n", b"\r\n\r\n", b"HTTP/1.0", b"CONNECT",
    b"http://a", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
]  # fmt: skip


def broken(rng: random.Random) -> bytes:
    """One to three requests with bytes lost, changed, repeated or put in, or without their end."""
    data = bytearray(b"".join(rng.choices(REQUESTS, k=rng.randint(1, 3))))
    for _ in range(rng.randint(1, 3)):
        at, other = sorted(rng.choices(range(len(data) + 1), k=2))
        match rng.randrange(5):
            case 0:
                del data[at : at + rng.randint(1, 8)]
            case 1:
                data[at:at] = rng.choice(PIECES)
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case 3:
                data[at:at] = data[at:other]
            case 4:
                del data[other:]
    return bytes(data)


async def said(cluster: Cluster, data: bytes, cut: int) -> bytes:
    """All that comes back for `data`, sent in two parts, until the router closes."""
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(data[:cut])
        await asyncio.sleep(0.01)
        writer.write(data[cut:])
        async with asyncio.timeout(DEADLINE_S):
            while piece := await reader.read(65_536):
                answer += piece
    writer.transport.abort()
    return answer


def statuses(answer: bytes) -> list[int]:
    """Of all responses; each error among them has the one shape, and nothing is cut off."""
    found = []
    while answer:
        head, answer = answer.split(b"\r\n\r\n", 1)
        status = int(head.split()[1])
        found.append(status)
        if status not in (100, 204):
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            body, answer = json.loads(answer[:length]), answer[length:]
            assert status == 200 or set(body["error"]) == {"message", "type", "param", "code"}
            assert length < 600
    return found


@pytest.mark.medium
async def test_broken_http_gets_whole_answers_and_is_let_go(
    start_cluster: StartCluster, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(1)
    cluster = await start_cluster(header_timeout_s=1.0, body_timeout_s=1.0, keepalive_s=1.0, cors_origins="*")
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def answer_to(data: bytes) -> bytes:
        async with limit:
            return await said(cluster, data, rng.randrange(len(data) + 1))

    answers = await asyncio.gather(*(answer_to(broken(rng)) for _ in range(NUM_CONNECTIONS)))
    found = {status for answer in answers for status in statuses(answer)}
    assert found >= {200, 400, 404, 408}
    assert 500 not in found
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    server = cluster.runner.server
    assert server is not None
    await cluster.until(lambda: not server.connections, "all connections let go")
