"""The pause of streams after a worker is killed, and the time until another worker takes the place.

    baton serve MODEL --decode 2 &          # Or --standby decode.
    python -m benchmarks.deaths --url http://127.0.0.1:8000 --role decode [--streams 16] [--kills 5]

A worker of the role is killed (SIGKILL) once every stream has begun. The process id comes from `/health`, so the server
must run on this machine and start workers again. A stream's pause is the longest gap after the kill. Each death has new
streams. The next death waits until as many workers serve as before, and as many standbys are in reserve. A standby in
reserve is never killed.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.streams import exit_code, streaming
from common.base.percentiles import percentile
from deploy.bench.client import Target, open_session, served_model
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure, RequestRecord
from deploy.bench.workload import Lengths, random_prompts

LOOK_S = 0.05
ROLES = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Process ids by role: serving workers, and standbys in reserve."""

    serving: dict[str, list[int]]
    reserve: dict[str, list[int]]

    def is_replaced(self, victim: int, now: "Fleet") -> bool:
        """Tell whether `now` has as many workers and standbys as before, without `victim`."""
        sides = [(self.serving, now.serving), (self.reserve, now.reserve)]
        there = all(len(after[role]) >= len(before[role]) for before, after in sides for role in ROLES)
        return there and all(victim not in after[role] for _, after in sides for role in ROLES)


@dataclass(frozen=True, slots=True)
class Death:
    """Effects of a kill, in seconds."""

    pauses_s: list[float]  # of each stream
    replaced_s: float  # from the kill until as many workers as before


def pause_s(stream: RequestRecord, begin_s: float) -> float:
    """Return the longest gap of a stream, among gaps that ended after `begin_s`; 0 without any."""
    gaps = [after - before for before, after in pairwise(stream.chunk_times_s) if after > begin_s]
    return max(gaps, default=0.0)


async def fleet_now(session: aiohttp.ClientSession, url: str) -> Fleet:
    """Return the workers in the router's `/health`."""
    async with session.get(f"{url}/health") as response:
        workers = (await response.json())["workers"]

    def pids(*, in_reserve: bool) -> dict[str, list[int]]:
        return {role: [each["pid"] for each in workers[role] if _in_reserve(each) == in_reserve] for role in ROLES}

    return Fleet(pids(in_reserve=False), pids(in_reserve=True))


def _in_reserve(worker: dict[str, Any]) -> bool:
    return bool(worker["standby"] and worker["standby"]["in_reserve"])


async def one_death(args: argparse.Namespace, target: Target, session: aiohttp.ClientSession, number: int) -> Death:
    """Kill the next worker by turn, under new streams."""
    before = await fleet_now(session, args.url)
    serving = before.serving[args.role]
    victim = serving[number % len(serving)]
    lengths = Lengths.fixed(args.input_len, args.max_tokens)
    prompts = random_prompts(args.streams, lengths, range(args.vocab_size), f"{args.seed}, death {number}")
    async with streaming(target, prompts, args.deadline_s) as streams:
        await asyncio.sleep(args.before_s)
        begin_s = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(args.deadline_s):
            while not before.is_replaced(victim, await fleet_now(session, args.url)):
                await asyncio.sleep(LOOK_S)
            replaced_s = time.perf_counter() - begin_s
            while any(stream.chunk_times_s[-1] < begin_s + replaced_s for stream in streams):
                await asyncio.sleep(LOOK_S)
    return Death([pause_s(stream, begin_s) for stream in streams], replaced_s)


def figures_of(deaths: Sequence[Death]) -> list[Figure]:
    pauses = sorted(pause for death in deaths for pause in death.pauses_s)
    return [
        Figure("pause_p50", percentile(pauses, 50) * 1e3, "ms"),
        Figure("pause_max", pauses[-1] * 1e3, "ms"),
        Figure("replaced_max", max(death.replaced_s for death in deaths), "s"),
    ]


async def run(args: argparse.Namespace, console: Console) -> None:
    """Kill all workers by turn; show the figures and append the rows."""
    async with open_session() as session:
        model = await served_model(session, args.url, args.deadline_s)
        target = Target(session, args.url, model, args.deadline_s)
        num_standbys = len((await fleet_now(session, args.url)).reserve[args.role])
        deaths = [await one_death(args, target, session, number) for number in range(args.kills)]
    figures = figures_of(deaths)
    workload = f"{args.kills} kills of a {args.role} worker under {args.streams} streams of {args.input_len} tokens"
    workload += f", {num_standbys} in reserve" if num_standbys else ""
    table = Table("figure", args.system, title=workload)
    for figure in figures:
        table.add_row(f"{figure.name} {figure.unit}", f"{figure.value:,.1f}")
    console.print(table)
    if args.results:
        name = args.hardware or hardware()
        append_rows(args.results, [row_of(name, model, workload, figure, system=args.system) for figure in figures])


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deaths", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to load, on this machine")
    parser.add_argument("--system", default="baton", help="its label")
    parser.add_argument("--role", choices=ROLES, default="decode", help="whom to kill (default: decode)")
    parser.add_argument("--streams", type=int, default=16, help="streams meanwhile (default: 16)")
    parser.add_argument("--kills", type=int, default=5, help="deaths, one after the other (default: 5)")
    parser.add_argument("--input-len", type=int, default=1000, help="prompt tokens of a stream (default: 1000)")
    parser.add_argument("--max-tokens", type=int, default=20_000, help="a stream must not end before (default: 20000)")
    parser.add_argument("--before-s", type=float, default=1.0, help="streams run so long before a kill (default: 1)")
    parser.add_argument("--vocab-size", type=int, default=151_000, help="prompt ids are below this (default: 151000)")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="for one death (default: 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")
    args = parser.parse_args(argv)
    if min(args.streams, args.kills, args.input_len, args.max_tokens, args.vocab_size) < 1:
        parser.error("--streams, --kills and all lengths: at least 1")
    args.url = args.url.rstrip("/")
    return args


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 when a stream ended early or a dead worker was not replaced."""
    args, console = parse_args(argv), Console()
    return exit_code(run(args, console), console, late=f"not over within {args.deadline_s:g} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
