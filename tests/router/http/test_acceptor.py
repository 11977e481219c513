"""Listening sockets: a host's addresses that the machine has."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from router.http.acceptor import bound_sockets

ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737), which no machine has."""


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every host have these addresses, as /etc/hosts gives localhost two."""

    async def getaddrinfo(host: Any, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("addresses", [(ELSEWHERE, "127.0.0.1"), ("127.0.0.1", ELSEWHERE)])
async def test_an_address_that_the_machine_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    named(monkeypatch, *addresses)
    (listener,) = await bound_sockets("localhost", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


async def test_a_host_of_another_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, ELSEWHERE)
    with pytest.raises(OSError) as caught:
        await bound_sockets("elsewhere", 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL
