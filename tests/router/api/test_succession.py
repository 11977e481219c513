"""A port that passes from router to router, and from who holds it to routers: no request is refused meanwhile."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from common.wire.transport.port_sharing import PortLoan, PortOffer, borrow
from router.api.succession import SUCCESSION, Succession, port_path
from router.program import _drain
from tests.router.conftest import Cluster, StartCluster

BODY = {"prompt": "the quick", "max_tokens": 8, "temperature": 0}
NUM_CLIENTS = 6
DEADLINE_S = 60.0


async def serving(start_cluster: StartCluster, **router: object) -> Cluster:
    cluster = await start_cluster(**router)
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    return cluster


def succession_of(cluster: Cluster) -> Succession:
    return cluster.runner.app[SUCCESSION]


def forget(loan: PortLoan) -> None:
    loan.close()
    for listener in loan.listeners:
        listener.close()


class Load:
    """Clients that ask one thing after the other, half of them on a connection each and half on a new one each time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: Counter[str] = Counter()  # by the router's way to say that the connection ends, or errors

    async def ask(self, session: aiohttp.ClientSession) -> None:
        async with session.post(f"{self.url}/v1/completions", json=BODY) as response:
            await response.read()
            self.answers[f"{response.status}"] += 1

    async def client(self, number: int) -> None:
        while True:
            connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
            async with aiohttp.ClientSession(connector=connector) as session:
                while True:
                    try:
                        await self.ask(session)
                    except aiohttp.ClientError as error:
                        self.answers[type(error).__name__] += 1

    async def until_more(self, num: int) -> None:
        goal = self.answers.total() + num
        async with asyncio.timeout(DEADLINE_S):
            while self.answers.total() < goal:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def under_load(url: str) -> AsyncIterator[Load]:
    load = Load(url)
    tasks = [asyncio.create_task(load.client(number)) for number in range(NUM_CLIENTS)]
    yield load
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_router_takes_the_port_over_and_nobody_is_refused(start_cluster: StartCluster) -> None:
    old = await serving(start_cluster)
    port = int(old.url.rpartition(":")[2])
    async with under_load(old.url) as load:
        await load.until_more(50)
        new = await start_cluster(port=port, take_over="auto")
        assert new.url == old.url
        await load.until_more(50)
        assert not succession_of(old).relieved.is_set(), "nobody is there yet who would answer"
        new.prefill("prefill-1")
        new.decode("decode-1")
        async with asyncio.timeout(DEADLINE_S):
            await succession_of(old).relieved.wait()
        await asyncio.wait_for(_drain(old.service.config.router, old.service, succession_of(old)), DEADLINE_S)
        assert not old.service.dispatcher.num_active
        num_before = load.answers.total()
        await old.runner.cleanup()
        await load.until_more(50)
        assert load.answers.total() > num_before
    assert set(load.answers) == {"200"}
    assert new.service.metrics.tokens.num_generated > 0
    third = await borrow(port_path(port))
    assert third is not None, "the next one takes it over from this one"
    forget(third)


async def test_without_a_router_to_take_over_from_the_port_is_bound(start_cluster: StartCluster) -> None:
    cluster = await serving(start_cluster, take_over="auto")
    async with aiohttp.ClientSession() as session, session.post(f"{cluster.url}/v1/completions", json=BODY) as answer:
        assert answer.status == 200


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A port that somebody holds; its URL, and where it is handed out."""
    path = tmp_path / "http.sock"
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        offer = PortOffer(path, [listener])
        offer.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", path
        await offer.close()


async def test_while_one_router_ends_and_the_next_begins_requests_wait(
    start_cluster: StartCluster, held: tuple[str, Path]
) -> None:
    url, path = held
    first = await serving(start_cluster, take_over=str(path))
    async with under_load(url) as load:
        await load.until_more(50)
        assert succession_of(first).has_successor, "whoever comes next has the port"
        await asyncio.wait_for(_drain(first.service.config.router, first.service, succession_of(first)), DEADLINE_S)
        await first.runner.cleanup()
        num_before = load.answers.total()
        await serving(start_cluster, take_over=str(path))
        await load.until_more(50)
    assert set(load.answers) == {"200"} and load.answers.total() > num_before


async def test_a_port_that_is_held_anew_is_served_again(start_cluster: StartCluster, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    cluster = await serving(start_cluster, take_over=str(path))
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            offer = PortOffer(path, [listener])
            offer.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            timeout = aiohttp.ClientTimeout(DEADLINE_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{url}/v1/completions", json=BODY) as answer,
            ):
                assert answer.status == 200
            await offer.close()
        await cluster.until(lambda: not succession_of(cluster).has_successor, "it notices that nobody holds it")


async def test_a_path_that_another_hands_a_port_out_at_is_left_alone(held: tuple[str, Path]) -> None:
    _, path = held
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = PortOffer(path, [listener])
        with pytest.raises(OSError, match="another process"):
            other.start()
        await other.close()
    loan = await borrow(path)
    assert loan is not None
    forget(loan)
    assert await borrow(path.with_name("nothing")) is None
