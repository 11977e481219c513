"""Answers that nobody reads: a bounded time, a bounded number of bytes, and nothing else is kept for them."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from router.dispatch.completion.state import Completion
from router.http import unread_answers
from router.http.unread_answers import PATIENCE_S, Reason, Unread, UnreadAnswer
from tests.router.conftest import MAX_MODEL_LEN, Cluster, StartCluster

MIB = 1 << 20
NUM_TEXTS = 64


class FakeTransport:
    """A transport whose reader is the test."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def get_extra_info(self, name: str) -> "FakeTransport":
        return self

    def fileno(self) -> int:
        raise OSError("no socket")

    def abort(self) -> None:
        self.is_aborted = True


class Room:
    """Unread answers, with a clock moved by hand."""

    def __init__(self, max_bytes: int) -> None:
        self.now_s = 0.0
        self.unread = Unread(max_bytes, lambda: self.now_s)

    def answer(self, num_bytes: int, client: str = "") -> tuple[FakeTransport, UnreadAnswer]:
        transport = FakeTransport(num_bytes)
        return transport, self.unread.begin(cast(asyncio.Transport, transport), client, stall_s=60.0)

    def check(self, seconds: float) -> None:
        self.now_s += seconds
        self.unread.check()

    def num_cut(self, reason: Reason) -> float:
        samples = (sample for family in self.unread.collect() for sample in family.samples)
        [value] = [each.value for each in samples if each.labels == {"reason": reason.value}]
        return value


async def test_who_reads_a_byte_a_minute_goes_on_and_who_reads_none_does_not() -> None:
    room = Room(1000 * MIB)
    slow, _ = room.answer(MIB)
    stopped, _ = room.answer(MIB)
    for _ in range(10):
        slow.num_bytes -= 1
        room.check(50.0)
    assert not slow.is_aborted and stopped.is_aborted
    room.check(70.0)
    assert slow.is_aborted
    assert room.num_cut(Reason.STALLED) == 2 and room.unread.num_bytes == 0


@pytest.mark.parametrize("num_read", [0, 1])
async def test_what_is_written_meanwhile_hides_neither_reading_nor_its_absence(num_read: int) -> None:
    room = Room(1000 * MIB)
    transport, waiting = room.answer(MIB)
    for _ in range(3):
        transport.num_bytes += 5000 - num_read
        waiting.num_left += 5000
        room.check(50.0)
    assert transport.is_aborted == (not num_read)


async def test_too_much_unread_costs_the_largest_answer_of_the_client_that_has_most() -> None:
    room = Room(12 * MIB)
    hog = [room.answer(size * MIB, "hog")[0] for size in (1, 4, 2)]
    others = [room.answer(3 * MIB, f"user {number}")[0] for number in range(2)]
    room.check(PATIENCE_S / 2)
    assert not any(each.is_aborted for each in hog + others), "a moment is everybody's"
    room.check(PATIENCE_S / 2)
    assert [each.is_aborted for each in hog] == [False, True, False]
    assert not any(each.is_aborted for each in others)
    assert room.num_cut(Reason.SIZE) == 1 and room.unread.num_bytes == 9 * MIB


async def test_a_client_has_a_part_of_what_all_may_have() -> None:
    room = Room(12 * MIB)
    hog = [room.answer(2 * MIB, "hog")[0] for _ in range(2)]
    room.check(PATIENCE_S)
    assert sorted(each.is_aborted for each in hog) == [False, True]


Ask = Callable[[Cluster], Awaitable[None]]


@pytest.fixture
def streams() -> Iterator[list[socket.socket]]:
    """Connections that are closed in the end."""
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
async def ask(streams: list[socket.socket]) -> AsyncIterator[Ask]:
    """Asks for a stream of many megabytes, and reads none of it."""

    async def ask(cluster: Cluster) -> None:
        fields: dict[str, Any] = {"prompt": [7], "max_tokens": MAX_MODEL_LEN - 10, "ignore_eos": True, "logprobs": 5}
        body = json.dumps(fields | {"stream": True, "n": NUM_TEXTS}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client, loop = socket.socket(), asyncio.get_running_loop()
        streams.append(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(cluster.url.rsplit(":", 1)[1])))
        await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + body)
        await cluster.until(lambda: cluster.service.dispatcher.num_active, "the request")
        await cluster.until(lambda: not cluster.service.dispatcher.num_active, "the end of its texts")

    yield ask


def _num_kept(since: int) -> int:
    """Completions that were made since there were so many, and are there."""
    return len([each for each in gc.get_objects() if type(each) is Completion]) - since


@pytest.mark.slow
async def test_of_texts_that_are_over_nothing_is_kept_but_unread_bytes(start_cluster: StartCluster, ask: Ask) -> None:
    cluster = await start_cluster(max_requests=NUM_TEXTS)
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    gc.collect()
    num_others = _num_kept(0)
    for _ in range(2):
        await ask(cluster)
    await cluster.until(lambda: _num_kept(num_others) <= 0, "texts that are over are forgotten")
    assert cluster.service.unread.num_bytes > MIB


@pytest.mark.medium
@pytest.mark.parametrize("reason", Reason)
async def test_a_stream_that_nobody_reads_ends(
    start_cluster: StartCluster, ask: Ask, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason is Reason.STALLED:
        monkeypatch.setattr(unread_answers, "WRITE_S", 0.2)
    else:
        monkeypatch.setattr(unread_answers, "PATIENCE_S", 0.0)
        monkeypatch.setattr(unread_answers, "MAX_CHECK_S", 0.1)
    cluster = await start_cluster(**({} if reason is Reason.STALLED else {"max_unread_bytes": MIB}))
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    await ask(cluster)
    server = cluster.runner.server
    assert server is not None
    await cluster.until(lambda: not server.connections, "the end of the connection")
    registry = cluster.service.metrics.registry
    assert registry.get_sample_value("baton_unread_answers_cut_total", {"reason": reason.value}) == 1
    assert registry.get_sample_value("baton_unread_bytes") == 0
