"""Room for those who ask, where descriptors are short."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from common.settings.config import RouterSection
from router.http.connection import Connection
from router.http.connection_limit import Connections, DescriptorLimits


async def test_who_has_asked_is_not_taken_for_silent_before_the_loop_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.connection_limit.SILENT_S", -1.0)  # all patience is over

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response()

    server, limits = web.Server(answer), DescriptorLimits(num_shared=100, num_surplus=10)
    connections = Connections(cast(Any, SimpleNamespace(server=server)), limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        for _ in clients:
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: Connection(server, RouterSection()), accepted)
    asks, is_silent = clients
    asks.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert connections.close_silent() == 1, "nothing is awaited, so nothing is read"
    is_silent.settimeout(5.0)
    assert await asyncio.to_thread(is_silent.recv, 1) == b""
    assert (await asyncio.to_thread(asks.recv, 100)).startswith(b"HTTP/1.1 200 OK")
    await server.shutdown(1.0)
    for client in clients:
        client.close()
