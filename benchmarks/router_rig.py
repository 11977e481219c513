"""A router process, with two workers without a model and loading clients in processes of their own.

The workers are the fakes of the router's tests. Fakes speak the real wire and make up tokens at a given pace.
"""

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import aiohttp
import tokenizers
import uvloop

from benchmarks.process_memory import family, resident_bytes
from benchmarks.router_bodies import LOADS
from common.settings.config import ModelSection, NetSection
from common.wire.values.fingerprint import model_fingerprint, tokenizer_fingerprint
from deploy.bench.client import HEADERS, open_session
from router.text.tokenizer import Tokenizer
from tests.support.fakes import FakeDecode, FakeModel, FakePrefill

START_DEADLINE_S = 60.0
REQUEST_DEADLINE_S = 120.0
RETRY_AFTER_S = 1.0
CLIENT_NICENESS = 10
"""Niceness of loading clients, which stand for other machines: the router gets the processor first."""


Serve = Callable[[str, str, float], None]
"""Runs workers: of a model, at an endpoint, with a step of some seconds."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A serving router, or a front."""

    url: str
    pid: int
    fronts: tuple["Rig", ...] = ()

    @property
    def urls(self) -> list[str]:
        """URLs for clients: the fronts', if there are any."""
        return [front.url for front in self.fronts] or [self.url]

    def memory_bytes(self) -> int:
        """Return the present RSS, summed over the router and all its descendants."""
        return sum(map(resident_bytes, family(self.pid)))

    def cpu_s(self) -> float:
        """Return the processor time of the router itself since the start."""
        return sum(map(_run_s, Path(f"/proc/{self.pid}/task").iterdir()))

    def loop_s(self) -> float:
        """Return the processor time of the thread of the router's event loop."""
        return _run_s(Path(f"/proc/{self.pid}/task/{self.pid}"))


@contextmanager
def running_router(model: str, step_s: float, serve: Serve | None = None, num_fronts: int = 0) -> Iterator[Rig]:
    """Start a router for `model`, its fronts, and a prefill and a decode worker; all end with the context.

    The decode worker makes tokens every `step_s`. The workers are those of `serve`, which runs in a process.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        endpoint, modules = f"ipc://{directory}/router", ["router", *["router.front"] * num_fronts]
        flags = ["--model-path", model, "--net-router-endpoint", endpoint]
        flags += ["--router-front-endpoint", f"ipc://{directory}/front"] if num_fronts else []
        ports = [_free_port() for _ in modules]
        with Path(directory, "log").open("w") as log:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", module, *flags, "--router-port", str(port)], stderr=log, stdout=log
                )
                for module, port in zip(modules, ports, strict=True)
            ]
        args = (model, endpoint, step_s)
        workers = multiprocessing.get_context("spawn").Process(target=serve or serve_fakes, args=args)
        workers.start()
        try:
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            for url in urls:
                asyncio.run(_until_ready(url))
            router, *fronts = (Rig(url, process.pid) for url, process in zip(urls, processes, strict=True))
            yield Rig(router.url, router.pid, tuple(fronts))
        finally:
            workers.terminate()
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(REQUEST_DEADLINE_S)
            workers.join(REQUEST_DEADLINE_S)


@dataclass(slots=True)
class Answers:
    """Requests of the loading clients by HTTP status (0: the connection broke)."""

    by_status: dict[int, int] = field(default_factory=dict)

    def count(self, status: int) -> None:
        self.by_status[status] = self.by_status.get(status, 0) + 1

    def __str__(self) -> str:
        return ", ".join(f"{number} x {status}" for status, number in sorted(self.by_status.items())) or "-"


class Clients:
    """A load, sent from another process to leave the watching process undisturbed."""

    def __init__(self, name: str, url: str, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, self._stop, self._answers = context.Event(), context.Event(), context.Queue()
        args = (name, url, model, self._ready, self._stop, self._answers)
        self._process = context.Process(target=_send_load, args=args)
        self._process.start()

    def started(self) -> bool:
        """Tell whether all bodies are made and the first are on the way."""
        return self._ready.is_set()

    def stop(self) -> tuple[Answers, float]:
        """Stop the load; return the answers and the seconds taken."""
        self._stop.set()
        by_status, duration_s = self._answers.get(timeout=REQUEST_DEADLINE_S)
        self._process.join(REQUEST_DEADLINE_S)
        return Answers(by_status), duration_s


def _run_s(task: Path) -> float:
    """Return the processor time of a thread, to the nanosecond; 0 after its end."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def _send_load(name: str, url: str, model: str, ready: Event, stop: Event, answers: Any) -> None:
    os.nice(CLIENT_NICENESS)
    load, clients = LOADS[name], Answers()
    bodies = load.make(tokenizers.Tokenizer.from_file(str(Path(model) / "tokenizer.json")))
    ready.set()
    started_s = time.perf_counter()
    uvloop.run(_keep_sending(url, bodies, load.num_clients, stop, clients))
    answers.put((clients.by_status, time.perf_counter() - started_s))


async def _keep_sending(url: str, bodies: list[bytes], num_clients: int, stop: Event, answers: Answers) -> None:
    async def client(number: int) -> None:
        while True:
            status = await _post(session, url, bodies[number % len(bodies)])
            answers.count(status)
            number += num_clients
            if stop.is_set():
                return
            if status == 429:
                await asyncio.sleep(RETRY_AFTER_S)  # as the server asks

    async with open_session() as session:
        await asyncio.gather(*map(client, range(num_clients)))


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> int:
    try:
        async with (
            asyncio.timeout(REQUEST_DEADLINE_S),
            session.post(f"{url}/v1/completions", data=body, headers=HEADERS) as response,
        ):
            await response.read()
            return response.status
    except (OSError, aiohttp.ClientError, TimeoutError):
        return 0


def serve_fakes(model_dir: str, endpoint: str, step_s: float) -> None:
    """Run the two fakes of the router's tests."""
    run_fakes(endpoint, step_s, fake_model(model_dir), FakePrefill)


def run_fakes(
    endpoint: str, step_s: float, model: FakeModel, prefill: type[FakePrefill], memory_server: str = ""
) -> None:
    """Run a decode worker, and a prefill worker of a class, until the process is ended.

    Their blocks are in one pool if they name a memory server, else in a pool each.
    """
    net = NetSection(router_endpoint=endpoint)
    decode = FakeDecode(net, model, "decode-0", max_num_seqs=4096, memory_server_id=memory_server)
    decode.step_s = step_s
    prompts = prefill(net, model, "prefill-0", max_batch_tokens=1 << 20, memory_server_id=memory_server)
    for worker in (decode, prompts):
        worker.start()
    while True:
        time.sleep(1.0)
        decode.received.clear()


def fake_model(model_dir: str) -> FakeModel:
    """Return a fake that the router takes for the model of a directory."""
    path, info = Path(model_dir), Tokenizer(ModelSection(path=model_dir)).info
    return FakeModel(info.name, model_fingerprint(path), tokenizer_fingerprint(path), info.vocab_size)


async def _until_ready(url: str) -> None:
    async with asyncio.timeout(START_DEADLINE_S), open_session() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
