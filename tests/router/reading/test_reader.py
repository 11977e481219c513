"""Long bodies: the process that reads them, what it may cost, and what is refused before it is read."""

import asyncio
import gzip
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.base.errors import ConfigError, RequestError
from common.settings.config import RouterSection
from router.base.helper_frames import BODY, Kind
from router.placement.capacity import most_tokens
from router.reading import bodies
from router.reading.bodies import NUM_FREE_BYTES
from router.reading.reader_process import ReaderProcess
from tests.router.conftest import Cluster, StartCluster

JSON = {"Content-Type": "application/json"}
PADDING = " " * (2 * NUM_FREE_BYTES)


def long_body(**fields: Any) -> bytes:
    return (PADDING + json.dumps({"prompt": "the fox", "temperature": 0} | fields)).encode()


async def answer(session: aiohttp.ClientSession, data: Any, **headers: str) -> tuple[int, Any]:
    data = io.BytesIO(data) if isinstance(data, bytes) else data
    async with session.post("/v1/completions", data=data, headers=JSON | headers) as response:
        body = await response.json()
        return response.status, body.get("choices") or body["error"]["code"]


async def child_of(cluster: Cluster) -> tuple[ReaderProcess, int]:
    """The process that reads, after its first body."""
    await cluster.service.reader.warm_up()
    reader = cluster.service.reader._process
    assert reader._helper.process is not None
    return reader, reader._helper.process.pid


def is_being_told(reader: ReaderProcess) -> bool:
    """Whether it has not taken all of a body yet."""
    process = reader._helper.process
    assert process is not None and process.stdin is not None
    return process.stdin.transport.get_write_buffer_size() > 0


@pytest.mark.medium
async def test_a_long_body_is_answered_as_a_short_one_is(cluster: Cluster) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"prompt": ["a", "schöne Grüße"], "n": 3, "max_tokens": 5},
        {"prompt": [[1, 2], [3]], "stop": ["e"]},
        {"n": 0},
        {"prompt": [1] * 600},
        {"prompt": "the fox " * 5000},
    ]
    async with aiohttp.ClientSession(cluster.url) as session:
        for fields in cases:
            short = await answer(session, json.dumps({"prompt": "the fox", "temperature": 0} | fields))
            assert await answer(session, long_body(**fields)) == short


@pytest.mark.medium
async def test_a_body_that_ends_its_process_costs_only_its_own_request(cluster: Cluster) -> None:
    reader, pid = await child_of(cluster)
    async with aiohttp.ClientSession(cluster.url) as session:
        os.kill(pid, signal.SIGSTOP)
        body = b" " * 2_000_000 + long_body()  # more than a pipe holds
        first, second = (asyncio.create_task(answer(session, body)) for _ in range(2))
        await cluster.until(lambda: is_being_told(reader) and reader._jobs.qsize(), "one is being read, one waits")
        os.kill(pid, signal.SIGKILL)
        outcomes = await asyncio.gather(first, second)
        assert sorted(status for status, _ in outcomes) == [200, 413]
        reader, pid = await child_of(cluster)
        os.kill(pid, signal.SIGKILL)  # while it has nothing to do
        assert reader._helper.process is not None
        await reader._helper.process.wait()
        assert (await answer(session, long_body()))[0] == 200
    assert cluster.service.bodies.num_counted == 0


@pytest.mark.medium
async def test_ids_do_not_wait_for_long_bodies(cluster: Cluster) -> None:
    _, pid = await child_of(cluster)
    os.kill(pid, signal.SIGSTOP)
    prompts = [[number % 50] * 200 for number in range(70)]
    data = json.dumps({"prompt": prompts, "temperature": 0, "max_tokens": 1}).encode()
    assert len(data) > NUM_FREE_BYTES
    async with aiohttp.ClientSession(cluster.url) as session:
        status, choices = await answer(session, data)
        assert (status, len(choices)) == (200, len(prompts))
        assert await answer(session, data.replace(b"0]", b"-1]", 1)) == (400, "invalid_value"), "it is short here"
    os.kill(pid, signal.SIGCONT)


@pytest.mark.medium
async def test_values_that_take_too_much_memory_are_refused_and_the_process_lives(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(max_body_bytes=4_000_000)
    _, pid = await child_of(cluster)
    async with aiohttp.ClientSession(cluster.url) as session:
        lists = b'{"prompt":[[]' + b",[]" * 1_300_000 + b"]}"
        assert await answer(session, lists) == (413, "request_too_large")
    assert (await child_of(cluster))[1] == pid


@pytest.mark.medium
async def test_clients_that_leave_do_not_shift_the_answers_of_others(cluster: Cluster) -> None:
    reader, pid = await child_of(cluster)
    pieces = [[long_body(prompt=[number])] for number in (1, 2, 3)]
    os.kill(pid, signal.SIGSTOP)
    reads = [asyncio.create_task(reader.read(each, 100)) for each in pieces]
    await asyncio.sleep(0.05)
    for read in reads[:2]:  # one that is being read, one that waits
        read.cancel()
    os.kill(pid, signal.SIGCONT)
    assert [list(prompt) for prompt in (await reads[2]).prompts] == [[3]]


@pytest.mark.medium
async def test_long_bodies_keep_out_one_another_and_no_short_one(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(max_body_bytes=160_000, max_bodies_bytes=160_000)
    cluster.decode(transport="none")
    await cluster.until(lambda: most_tokens(cluster.service.pool), "a worker")
    arrive = asyncio.Event()

    async def slowly() -> Any:
        yield b" " * 150_000
        await arrive.wait()
        yield b'{"prompt": "the fox"}'

    async with aiohttp.ClientSession(cluster.url) as session:
        slow = asyncio.create_task(answer(session, slowly()))
        await cluster.until(lambda: cluster.service.bodies.num_counted > 0, "the slow body")
        assert await answer(session, long_body()) == (429, "rate_limit_exceeded")
        assert (await answer(session, b'{"prompt": "the fox"}'))[0] == 200
        arrive.set()
        assert (await slow)[0] == 200
        assert (await answer(session, long_body()))[0] == 200


@pytest.mark.medium
async def test_bodies_too_large_or_compressed(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(max_body_bytes=100_000)

    async def pieces(number: int) -> Any:
        for _ in range(number):
            yield b" " * 1000

    async with aiohttp.ClientSession(cluster.url) as session:
        assert await answer(session, b" " * 100_001) == (413, "request_too_large")
        assert await answer(session, pieces(101)) == (413, "request_too_large")
        bomb = gzip.compress(b" " * 50_000_000)
        assert await answer(session, bomb, **{"Content-Encoding": "gzip"}) == (415, "unsupported_media_type")
    assert (cluster.service.bodies.num_open, cluster.service.bodies.num_counted) == (0, 0)


async def test_nobody_reads_the_body_of_a_request_that_is_not_taken(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SLOW_S", 1e9)
    cluster = await start_cluster(max_requests=1)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n"
    )
    host, port = cluster.url.removeprefix("http://").split(":")

    async def status() -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head)
            return await reader.readline()
        finally:
            writer.close()
            await writer.wait_closed()

    first = asyncio.create_task(status())
    await cluster.until(lambda: cluster.service.bodies.num_open == 1, "a body that does not come")
    assert b"429" in await asyncio.wait_for(status(), 60)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    cluster.service.dispatcher.refusing = True
    assert b"503" in await asyncio.wait_for(status(), 60)


async def test_a_process_that_cannot_be_started_is_an_error_of_the_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(RequestError, match="could not be read"):
        await cluster.service.reader.read([long_body()], 100)


def test_the_largest_body_has_room_among_all() -> None:
    with pytest.raises(ConfigError, match=r"max_bodies_bytes = 9: at least router\.max_body_bytes, 10"):
        RouterSection(max_body_bytes=10, max_bodies_bytes=9)


@pytest.mark.medium
def test_a_reader_whose_router_is_gone_ends_without_a_word(model_dir: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "router.reading.reader_main", "--model-path", str(model_dir)]
    data = BODY.pack(Kind.COMPLETION, len(body := long_body()), 600) + body
    done = subprocess.run(command, input=data, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
