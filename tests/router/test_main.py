"""The process as an operator meets it: its start, its exit status, its signals."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from common.settings.config import NetSection
from tests.support.fakes import FakeDecode, FakeModel, free_endpoint

DEADLINE_S = 60.0


class Process:
    """`python -m router` on free ports."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""

    async def line_with(self, pattern: str) -> str:
        """The first group of the first log line that matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stderr.readline()).decode():
                self.log += line
                if match := re.search(pattern, line):
                    return match.group(1)
        raise AssertionError(f"no line with {pattern!r} in:\n{self.log}")

    async def exit_status(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def router(model_dir: Path, open_files: int = 4096) -> AsyncIterator[Process]:
    flags = ["--model-path", str(model_dir), "--router-port", "0", "--net-router-endpoint", free_endpoint()]
    flags += ["--net-worker-timeout-s", "60"]  # a fake may not get to run for a while
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f'ulimit -n {open_files} && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "router",
        *flags,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        has_ended = process.returncode  # by itself, if it has
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        _, said = await process.communicate()
        print(f"exit status {has_ended}\n{said.decode()}")  # shown if the test fails


@pytest.mark.medium
@pytest.mark.parametrize("num_signals", [1, 2])
async def test_the_first_signal_drains_and_the_second_stops(
    model_dir: Path, model: FakeModel, num_signals: int
) -> None:
    async with router(model_dir) as process:
        endpoint = await process.line_with(r"workers dial (\S+)")
        url = await process.line_with(r"serving (http://\S+)")
        worker = FakeDecode(NetSection(router_endpoint=endpoint), model, "decode-0", transport="none")
        worker.most_outputs = 3
        worker.start()
        try:
            await process.line_with(r"(joined)")
            body = {"prompt": "the fox", "max_tokens": 100, "temperature": 0, "stream": True, "ignore_eos": True}
            async with aiohttp.ClientSession(url) as session, session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                process.process.send_signal(signal.SIGTERM)
                await process.line_with(r"(draining) 1 completions")
                async with session.post("/v1/completions", json=body) as refused:
                    assert refused.status == 503
                if num_signals == 2:
                    process.process.send_signal(signal.SIGTERM)
                else:
                    worker.most_outputs = 100
                events = (await response.content.read()).decode()
                assert events.endswith("data: [DONE]\n\n")
                assert ('"finish_reason": "length"' in events) == (num_signals == 1)
                assert ('"error"' in events) == (num_signals == 2)
            assert await process.exit_status() == 0
        finally:
            await asyncio.to_thread(worker.kill)


@pytest.mark.medium
def test_a_wrong_setting_is_explained_and_exits_with_2(tmp_path: Path, model_dir: Path) -> None:
    def said(*flags: str) -> str:
        run = subprocess.run([sys.executable, "-m", "router", *flags], capture_output=True, timeout=DEADLINE_S)
        assert run.returncode == 2
        assert b"Traceback" not in run.stderr
        return run.stderr.decode()

    assert "no directory with a model's config.json" in said("--model-path", str(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "max_position_embeddings": 5}')
    assert "tokenizer.json" in said("--model-path", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "fetch" in said("--model-path", str(tmp_path))
    assert "secret_file" in said("--model-path", str(model_dir), "--net-router-endpoint", "tcp://127.0.0.1:*")
    free = ("--model-path", str(model_dir), "--net-router-endpoint", free_endpoint())
    for host in ("203.0.113.1", "no..host", "h" * 70):
        assert "choose another router.host or router.port" in said(*free, "--router-host", host)
    too_few = ["sh", "-c", 'ulimit -n 100 && exec "$@"', "sh", sys.executable, "-m", "router", *free]
    run = subprocess.run(too_few, capture_output=True, timeout=DEADLINE_S, text=True)
    assert (run.returncode, "100 open files are allowed: at least 256" in run.stderr) == (2, True)


def asking(address: tuple[str, int]) -> socket.socket:
    """A client that has sent a request, but for the end of its body."""
    client = socket.create_connection(address, timeout=DEADLINE_S)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b'16\r\n{"prompt": "the fox", \r\n')
    client.setblocking(False)
    return client


@pytest.mark.medium
async def test_more_clients_than_descriptors_are_told_so(model_dir: Path, model: FakeModel) -> None:
    async with router(model_dir, open_files=256) as process:
        endpoint = await process.line_with(r"workers dial (\S+)")
        url = await process.line_with(r"serving (http://\S+)")
        worker = FakeDecode(NetSection(router_endpoint=endpoint), model, "decode-0", transport="none")
        worker.start()
        try:
            await process.line_with(r"(joined)")
            host, port = url.removeprefix("http://").split(":")
            clients = [await asyncio.to_thread(asking, (host, int(port))) for _ in range(400)]
            streams = [await asyncio.open_connection(sock=each) for each in clients]
            answers = [asyncio.create_task(reader.readline()) for reader, _ in streams]
            await process.line_with(r"(refused, \d+ without a request closed; raise `ulimit -n`)")
            async with aiohttp.ClientSession(url) as session:
                async with session.get("/live") as response:
                    assert response.status == 200
                num_refused = -1  # each has read the answer before others send on, lest its body meets a closed socket
                while num_refused < (num_done := sum(each.done() for each in answers)) or num_done < 400 - 192:
                    num_refused = num_done
                    await asyncio.sleep(0.5)
                for (_, writer), answer in zip(streams, answers, strict=True):
                    if not answer.done():
                        writer.write(b'10\r\n"max_tokens": 5}\r\n0\r\n\r\n')
                async with asyncio.timeout(DEADLINE_S):
                    statuses = [int(line.split()[1]) for line in await asyncio.gather(*answers)]
                assert set(statuses) == {200, 429}
                assert statuses.count(200) >= 128
                for _, writer in streams:
                    writer.close()
                async with session.post("/v1/completions", json={"prompt": "the fox"}) as response:
                    assert response.status == 200
        finally:
            await asyncio.to_thread(worker.kill)


@pytest.mark.medium
async def test_silent_connections_make_room_for_who_asks(model_dir: Path) -> None:
    async with router(model_dir, open_files=256) as process:
        url = await process.line_with(r"serving (http://\S+)")
        host, port = url.removeprefix("http://").split(":")
        silent = [socket.socket() for _ in range(500)]
        with contextlib.ExitStack() as opened:
            for each in silent:
                opened.enter_context(each)
                each.setblocking(False)
                each.connect_ex((host, int(port)))
            timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
            async with aiohttp.ClientSession(url, timeout=timeout) as session:
                statuses: list[int] = []
                while len(statuses) < 10 and statuses[-1:] != [400]:  # until a body is read, which is no request
                    async with session.post("/v1/completions", json={}, headers={"Connection": "close"}) as response:
                        statuses.append(response.status)
            assert statuses[-1] == 400, statuses
