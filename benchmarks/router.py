"""Effects of other clients' requests on streams, in a router without a model.

    python -m benchmarks.router deploy/demo_model

Streams run through the router at a steady pace, while other clients send a load after another. Measured are the longest
gap of a stream, the slowest answer of `/live`, and memory of the router with its child processes. Also measured are the
load's answers a second.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.router_bodies import LOADS, names
from benchmarks.router_rig import Answers, Clients, Rig, running_router
from common.base.percentiles import percentile
from deploy.bench.client import HEADERS, open_session
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure

PROBE_S = 0.02
SETTLE_S = 1.0


@dataclass(slots=True)
class Seen:
    """Measurements under a load; times in seconds."""

    load: str
    gaps_s: list[float] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    after_bytes: int = 0
    answers: Answers = field(default_factory=Answers)
    duration_s: float = 0.0
    cpu_share: float = 0.0
    watching: bool = False

    def figures(self) -> list[Figure]:
        num_answers = sum(self.answers.by_status.values())
        return [
            Figure("gap_p99", percentile(self.gaps_s, 99) * 1e3, "ms"),
            Figure("gap_max", max(self.gaps_s, default=0.0) * 1e3, "ms"),
            Figure("live_max", max(self.live_s, default=0.0) * 1e3, "ms"),
            Figure("memory_peak", self.peak_bytes / 1e6, "MB"),
            Figure("memory_after", self.after_bytes / 1e6, "MB"),
            Figure("router_cpu", self.cpu_share * 100, "%"),
            Figure("request_throughput", num_answers / max(self.duration_s, 1e-9), "requests/s"),
        ]


async def watch(rig: Rig, args: argparse.Namespace, load: str) -> Seen:
    """Run streams and probes before, during and after a load, and record the time of the load."""
    seen = Seen(load)
    async with open_session() as session:
        watchers = [asyncio.create_task(_follow(session, rig.url, seen)) for _ in range(args.streams)]
        watchers += [asyncio.create_task(_probe(session, rig.url, seen)), asyncio.create_task(_weigh(rig, seen))]
        await asyncio.sleep(SETTLE_S)
        clients = Clients(load, rig.url, args.model)
        while not clients.started():
            await asyncio.sleep(PROBE_S)
        seen.watching, cpu_s, started_s = True, rig.cpu_s(), time.perf_counter()
        await asyncio.sleep(args.seconds)
        seen.cpu_share = (rig.cpu_s() - cpu_s) / (time.perf_counter() - started_s)
        seen.answers, seen.duration_s = await asyncio.to_thread(clients.stop)
        seen.watching = False
        await asyncio.sleep(SETTLE_S)
        seen.after_bytes = rig.memory_bytes()
        for watcher in watchers:
            if watcher.done():
                watcher.result()  # a broken stream is an error of the run
            watcher.cancel()
    return seen


async def _follow(session: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    async with session.get(f"{url}/v1/models") as response:
        longest = (await response.json())["data"][0]["max_model_len"]
    body = json.dumps({"prompt": [1], "max_tokens": longest - 1, "stream": True, "ignore_eos": True}).encode()
    while True:
        async with session.post(f"{url}/v1/completions", data=body, headers=HEADERS) as response:
            response.raise_for_status()
            last_s = 0.0
            async for _ in response.content.iter_any():
                now_s = time.perf_counter()
                if seen.watching and last_s:
                    seen.gaps_s.append(now_s - last_s)
                last_s = now_s


async def _probe(session: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    while True:
        sent_s = time.perf_counter()
        async with session.get(f"{url}/live") as response:
            response.raise_for_status()
        if seen.watching:
            seen.live_s.append(time.perf_counter() - sent_s)
        await asyncio.sleep(PROBE_S)


async def _weigh(rig: Rig, seen: Seen) -> None:
    while True:
        if seen.watching:
            seen.peak_bytes = max(seen.peak_bytes, rig.memory_bytes())
        await asyncio.sleep(PROBE_S)


def show(console: Console, results: list[Seen], title: str) -> None:
    table = Table(title=title)
    table.add_column("beside")
    for figure in results[0].figures():
        table.add_column(f"{figure.name} {figure.unit}", justify="right")
    table.add_column("answers")
    for seen in results:
        table.add_row(seen.load, *(f"{figure.value:,.1f}" for figure in seen.figures()), str(seen.answers))
    console.print(table)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory with tokenizer.json and config.json; weights are not read")
    parser.add_argument(
        "--loads", type=names, default=list(LOADS), help="names, separated by semicolons (default: all)"
    )
    parser.add_argument("--streams", type=int, default=8, help="streams watched (default: 8)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time between two tokens of a stream (default: 10)")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each load lasts (default: 8)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 when a watched stream broke."""
    args = parse_args(argv)
    console = Console(width=170 if not sys.stdout.isatty() else None)
    results = []
    with running_router(args.model, args.step_ms / 1e3) as rig:
        for load in args.loads:
            try:
                results.append(uvloop.run(watch(rig, args, load)))
            except (aiohttp.ClientError, OSError) as error:
                console.print(f"beside {load} a stream broke: {type(error).__name__}: {error}", markup=False)
                return 1
    show(console, results, f"{args.streams} streams of a token every {args.step_ms:g} ms")
    if args.results:
        model = Path(args.model).resolve().name
        workloads = [(f"{args.streams} streams at {args.step_ms:g} ms beside {seen.load}", seen) for seen in results]
        rows = [row_of(hardware(), model, name, figure) for name, seen in workloads for figure in seen.figures()]
        append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
