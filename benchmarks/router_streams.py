"""Processor time of a router that reads prompts arriving together, and of one that carries streams.

    python -m benchmarks.router_streams /tmp/Qwen3-4B

The workers write a known text, and the client parses nothing. All prompts of a burst are sent at once, and the burst
ends when the prefill worker has the last. Then as many streams run at a steady pace. The thread of the event loop can
use one core, so its tokens per processor second are the most that a router carries. With `--fronts`, fronts write the
streams, and the figures of the loop are the dispatcher's. Figures are of the best repetition, because other programs on
the machine cause any excess.
"""

import argparse
import json
import multiprocessing
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tokenizers
from rich.console import Console
from rich.table import Table

from benchmarks.router_bodies import new_texts, prose
from benchmarks.router_rig import Rig, fake_model, run_fakes, running_router
from common.settings.config import ModelSection
from common.wire.messages.worker import PrefillRequest
from common.wire.values.sampling_params import SamplingParams
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure
from router.text.tokenizer import Tokenizer
from tests.support.fakes import FakeModel, FakePrefill

LOOK_S = 0.004
"""Time between two looks of the client: a client that waited in the kernel would be woken by the router's writes."""
SETTLE_S, WINDOW_S = 1.0, 1.0
DEADLINE_S = 60.0
OUTPUT_CHARS = 100_000
EVENT = b"data: {"
NUM_READ = 1 << 18

Shared = Any
"""Numbers shared by processes: see `ARRIVED` and so on."""
NUM_SENT, ARRIVED, LAST_S, NUM_BEGUN, NUM_EVENTS, NUM_BYTES = range(6)


@dataclass(frozen=True)
class TextModel(FakeModel):
    """A model whose outputs are pieces of a text, from a place that the seed names."""

    ids: Sequence[int] = ()

    def output(self, index: int, last: int, sampling: SamplingParams) -> int:
        return self.ids[(sampling.seed + index) % len(self.ids)]


class CountingPrefill(FakePrefill):
    """A prefill worker that notes when prompts arrive, and answers once the last of a burst is here."""

    shared: Shared

    def _open(self) -> None:
        super()._open()
        self._held: list[PrefillRequest] = []

    def _prefill(self, request: PrefillRequest) -> None:
        self._held.append(request)
        self.shared[ARRIVED] += 1
        if self.shared[ARRIVED] >= self.shared[NUM_SENT]:
            self.shared[LAST_S] = time.monotonic()
            for held in self._held:
                super()._prefill(held)
            self._held.clear()
            self.received.clear()


def serve(shared: Shared, model_dir: str, endpoint: str, step_s: float) -> None:
    """Run workers that write a text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
    CountingPrefill.shared = shared
    ids = tokenizer.encode(prose(OUTPUT_CHARS), add_special_tokens=False).ids
    run_fakes(endpoint, step_s, TextModel(**vars(fake_model(model_dir)), ids=ids), CountingPrefill, "memory")


def read_streams(
    addresses: Sequence[tuple[str, int]], bodies: Sequence[bytes], shared: Shared, ready: Any, go: Any
) -> None:
    """Send all bodies when told, to the addresses in turn; then read and count until all connections end."""
    selector, num_open = selectors.DefaultSelector(), len(bodies)
    connections = [socket.create_connection(addresses[i % len(addresses)]) for i in range(len(bodies))]
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ, [False])
    requests = [_request(body) for body in bodies]
    ready.set()
    go.wait()
    for connection, request in zip(connections, requests, strict=True):
        connection.sendall(request)
    while num_open:
        time.sleep(LOOK_S)
        for key, _ in selector.select(0):
            data = key.fileobj.recv(NUM_READ)  # type: ignore[union-attr]
            if not key.data[0]:
                assert data.startswith(b"HTTP/1.1 200 "), data
                key.data[0] = True
                shared[NUM_BEGUN] += 1
            shared[NUM_EVENTS] += data.count(EVENT)
            shared[NUM_BYTES] += len(data)
            if not data:
                selector.unregister(key.fileobj)
                num_open -= 1


def _request(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


@contextmanager
def client(rig: Rig, bodies: Sequence[bytes], shared: Shared) -> Iterator[Any]:
    """Run a client in a process; yields the event that makes it send its bodies, all connected before."""
    shared[:] = [0.0] * len(shared)
    shared[NUM_SENT] = len(bodies)
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    addresses = [(url.hostname, url.port) for url in map(urlsplit, rig.urls)]
    args = (addresses, bodies, shared, ready, go)
    process = context.Process(target=read_streams, args=args)
    process.start()
    try:
        assert ready.wait(DEADLINE_S), "the client did not start"
        yield go
    finally:
        process.terminate()
        process.join(DEADLINE_S)


def burst(rig: Rig, bodies: Sequence[bytes], shared: Shared) -> list[Figure]:
    """Send prompts at once; return the time until the last is at the worker, and the router's processor times."""
    with client(rig, bodies, shared) as go:
        time.sleep(SETTLE_S)
        cpu_s, loop_s, sent_s = rig.cpu_s(), rig.loop_s(), time.monotonic()
        go.set()
        _wait(lambda: shared[LAST_S])
        loop_s, cpu_s = rig.loop_s() - loop_s, rig.cpu_s() - cpu_s
        dispatched_s = shared[LAST_S] - sent_s
    return [
        Figure("dispatch", dispatched_s * 1e3, "ms"),
        Figure("loop_of_dispatch", loop_s * 1e3, "ms"),
        Figure("cpu_of_dispatch", cpu_s * 1e3, "ms"),
    ]


def stream(rig: Rig, bodies: Sequence[bytes], shared: Shared, num_windows: int) -> list[list[Figure]]:
    """Run streams; return for each window of a second the processor times, and what follows from them."""
    with client(rig, bodies, shared) as go:
        go.set()
        _wait(lambda: shared[NUM_BEGUN] >= len(bodies))
        time.sleep(SETTLE_S)
        figures = [_window(rig, shared) for _ in range(num_windows)]
    time.sleep(SETTLE_S)  # the router sees that the client is gone
    return figures


def _window(rig: Rig, shared: Shared) -> list[Figure]:
    cpu_s, loop_s, num_events, num_bytes = rig.cpu_s(), rig.loop_s(), shared[NUM_EVENTS], shared[NUM_BYTES]
    fronts_s = _fronts_s(rig)
    time.sleep(WINDOW_S)
    num_tokens, num_bytes = shared[NUM_EVENTS] - num_events, shared[NUM_BYTES] - num_bytes
    cpu_s, loop_s = rig.cpu_s() - cpu_s, rig.loop_s() - loop_s
    fronts = [now_s - before_s for before_s, now_s in zip(fronts_s, _fronts_s(rig), strict=True)]
    names = ("front_loop_per_1000_tokens", "front_cpu_per_1000_tokens") if rig.fronts else ()
    return [
        *(Figure(name, spent_s / num_tokens * 1e6, "ms") for name, spent_s in zip(names, fronts, strict=False)),
        Figure("loop_per_1000_tokens", loop_s / num_tokens * 1e6, "ms"),
        Figure("cpu_per_1000_tokens", cpu_s / num_tokens * 1e6, "ms"),
        Figure("tokens_per_loop_second", num_tokens / loop_s, "tok/s"),
        Figure("output_throughput", num_tokens / WINDOW_S, "tok/s"),
        Figure("bytes_per_token", num_bytes / num_tokens, "bytes"),
    ]


def _fronts_s(rig: Rig) -> tuple[float, float]:
    """Return the processor time of all fronts: of their loops, and of all their threads."""
    return sum(front.loop_s() for front in rig.fronts), sum(front.cpu_s() for front in rig.fronts)


def _best(repetitions: Sequence[list[Figure]]) -> list[Figure]:
    """Return the repetition with the least time of the loop."""
    return min(repetitions, key=lambda figures: min(each.value for each in figures if each.name.startswith("loop")))


def _wait(is_over: Any) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_over():
        assert time.monotonic() < deadline_s, "the router did not answer in time"
        time.sleep(LOOK_S)


def _bodies(texts: Sequence[str], max_tokens: int, **fields: object) -> list[bytes]:
    common = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, **fields}
    return [json.dumps({"prompt": text, "seed": 997 * i, **common}).encode() for i, text in enumerate(texts)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_streams", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="directory with tokenizer.json and config.json; weights are not read")
    parser.add_argument("--streams", type=int, default=256, help="prompts of a burst, and streams (default: 256)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time between two tokens of a stream (default: 20)")
    parser.add_argument("--seconds", type=int, default=8, help="windows in which streams are measured (default: 8)")
    parser.add_argument("--bursts", type=int, default=5, help="bursts (default: 5)")
    parser.add_argument("--fronts", type=int, default=0, help="fronts that write the texts (default: 0, the router)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    args = parser.parse_args(argv)
    shared = multiprocessing.get_context("spawn").Array("d", 6, lock=False)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    texts = list(new_texts(tokenizer, args.prompt_tokens, args.streams * (args.bursts + 1)))
    longest = Tokenizer(ModelSection(path=args.model)).info.max_model_len - 2 * args.prompt_tokens
    with running_router(args.model, args.step_ms / 1e3, partial(serve, shared), args.fronts) as rig:
        bursts = [texts[i * args.streams : (i + 1) * args.streams] for i in range(args.bursts + 1)]
        figures = _best([burst(rig, _bodies(each, 1), shared) for each in bursts[:-1]])
        figures += _best(stream(rig, _bodies(bursts[-1], longest), shared, args.seconds))
    title = f"{args.streams} prompts of {args.prompt_tokens} tokens, {args.streams} streams at {args.step_ms:g} ms"
    title += f", {args.fronts} fronts" if args.fronts else ""
    table = Table("figure", "value", "unit", title=title)
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:,.2f}", figure.unit)
    Console().print(table)
    if args.results:
        model = Path(args.model).resolve().name
        append_rows(args.results, [row_of(hardware(), model, f"router, {title}", figure) for figure in figures])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
