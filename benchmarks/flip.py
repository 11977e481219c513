"""Latency and throughput under a load whose mix flips: long prompts with short replies, then the reverse, and again.

    baton serve MODEL --prefill 1 --decode 2 --gpus 0,1 --autoscale &      # Repeat without --autoscale.
    python -m benchmarks.flip --url http://127.0.0.1:8000 --system 'baton --autoscale' --phases 64x8000/32,256x128/512

Each phase keeps a number of streams running for `--phase-s`. The next phase begins while the last streams of a phase
end. Figures are given for each kind of phase (a, b, ...) over all rounds, and apart for the second half (`settled`). A
server that follows the load has adapted by the second half. Throughput counts tokens received within a span. Latencies
are of requests sent within a span.
"""

import argparse
import asyncio
import math
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from common.base.percentiles import percentile
from deploy.bench.client import NoServer, Target, open_session, served_model
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure, RequestRecord
from deploy.bench.workload import Lengths, random_prompts

FORM = re.compile(r"(\d{1,6})x(\d{1,7})/(\d{1,6})")
CHANGES = re.compile(r'^baton_role_changes_total\{.*stage="done".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of streams with fixed lengths."""

    num_streams: int
    num_inputs: int
    num_outputs: int

    @staticmethod
    def parse(text: str) -> "Phase":
        """Parse `64x8000/32`; raises ValueError for anything else."""
        match = FORM.fullmatch(text)
        numbers = [int(part) for part in match.groups()] if match else [0]
        if min(numbers) < 1:
            raise ValueError(f"{text!r}: streams and two lengths, each at least 1, for example 64x8000/32")
        return Phase(*numbers)

    def __str__(self) -> str:
        return f"{self.num_streams} streams of {self.num_inputs}/{self.num_outputs}"


def parse_phases(text: str) -> list[Phase]:
    """Parse a comma-separated list of phases; raises ValueError."""
    return [Phase.parse(part) for part in text.split(",")]


@dataclass(slots=True)
class Seen:
    """Requests of a kind of phase, and the spans of time of the phase."""

    records: list[RequestRecord] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def figures(self, name: str) -> list[Figure]:
        """Return figures of the whole spans, and of the second halves."""
        halves = [((begin_s + end_s) / 2, end_s) for begin_s, end_s in self.spans]
        errors = Figure(f"{name}_errors", sum(bool(record.error) for record in self.records), "")
        return [*self._within(self.spans, name), *self._within(halves, f"{name}_settled"), errors]

    def _within(self, spans: Sequence[tuple[float, float]], name: str) -> list[Figure]:
        def is_in(time_s: float) -> bool:
            return any(begin_s <= time_s < end_s for begin_s, end_s in spans)

        good = [record for record in self.records if not record.error]
        seconds = sum(end_s - begin_s for begin_s, end_s in spans)
        sent = [record for record in good if is_in(record.sent_s)]
        num_tokens = sum(
            record.num_output_tokens / len(record.chunk_times_s) * sum(map(is_in, record.chunk_times_s))
            for record in good
        )
        return [
            Figure(f"{name}_requests", sum(is_in(record.ended_s) for record in good) / seconds, "requests/s"),
            Figure(f"{name}_output", num_tokens / seconds, "tokens/s"),
            *_latencies(f"{name}_ttft", (record.ttft_s for record in sent)),
            *_latencies(f"{name}_tpot", (tpot for record in sent if (tpot := record.tpot_s) is not None)),
            *_latencies(f"{name}_itl", (gap for record in sent for gap in record.gaps_s)),
        ]


def _latencies(name: str, values_s: Iterable[float]) -> list[Figure]:
    ordered = sorted(values_s)
    return [Figure(f"{name}_p{point}", percentile(ordered, point) * 1e3, "ms") for point in (50, 99)]


async def stream(
    target: Target, phase: Phase, vocabulary: Sequence[int], seed: str, end_s: float
) -> list[RequestRecord]:
    """Send requests back to back until `end_s`; the last request is followed to its end."""
    records: list[RequestRecord] = []
    lengths = Lengths.fixed(phase.num_inputs, phase.num_outputs)
    while time.perf_counter() < end_s:
        [prompt] = random_prompts(1, lengths, vocabulary, f"{seed}, request {len(records)}")
        [body] = target.prepare([prompt])
        records.append(await target.complete(prompt, body))
    return records


async def flip(args: argparse.Namespace, target: Target) -> list[Seen]:
    """Run all rounds of all phases."""
    seen = [Seen() for _ in args.phases]
    running: list[tuple[Seen, asyncio.Task[list[RequestRecord]]]] = []
    for number in range(args.rounds):
        for each, phase in zip(seen, args.phases, strict=True):
            begin_s = time.perf_counter()
            end_s = begin_s + args.phase_s
            each.spans.append((begin_s, end_s))
            for index in range(phase.num_streams):
                seed = f"{args.seed}, {args.system}, round {number}, {phase}, stream {index}"
                sending = stream(target, phase, range(args.vocab_size), seed, end_s)
                running.append((each, asyncio.create_task(sending)))
            await asyncio.sleep(end_s - time.perf_counter())
    for each, task in running:
        each.records += await task
    return seen


async def num_changes(session: aiohttp.ClientSession, url: str) -> float:
    """Return role changes since the router's start; NaN for a server without the metric."""
    async with session.get(f"{url}/metrics") as response:
        found = CHANGES.findall(await response.text())
    return sum(map(float, found)) if found else math.nan


async def run(args: argparse.Namespace, console: Console) -> bool:
    """Run the load, show the figures and append the rows; return True if all requests succeeded."""
    async with open_session() as session:
        model = await served_model(session, args.url, args.deadline_s)
        target = Target(session, args.url, model, args.deadline_s)
        before = await num_changes(session, args.url)
        seen = await flip(args, target)
        changes = await num_changes(session, args.url) - before
    figures = [each.figures(name) for name, each in zip(string.ascii_lowercase, seen, strict=False)]
    told = [figure for figure in chain(*figures, [Figure("role_changes", changes, "")]) if not math.isnan(figure.value)]
    workload = f"flip: {', then '.join(map(str, args.phases))}, {args.phase_s:g} s each, {args.rounds} times"
    show(console, args.system, workload, told)
    errors = Counter(record.error for each in seen for record in each.records if record.error)
    for error, count in errors.most_common(5):
        console.print(f"{count} x {error}", style="red", markup=False)
    if args.results:
        name = args.hardware or hardware()
        append_rows(args.results, [row_of(name, model, workload, figure, system=args.system) for figure in told])
    return not errors


def show(console: Console, system: str, workload: str, figures: Sequence[Figure]) -> None:
    table = Table("figure", system, title=workload)
    for figure in figures:
        value = f"{figure.value:,.2f}" if figure.unit else f"{figure.value:,.0f}"
        table.add_row(f"{figure.name} {figure.unit}".strip(), value)
    console.print(table)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flip", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to load")
    parser.add_argument("--system", default="baton", help="its label")
    parser.add_argument(
        "--phases",
        default="64x8000/32,256x128/512",
        metavar="STREAMSxIN/OUT,...",
        help="streams, prompt and output tokens of each phase (default: %(default)s)",
    )
    parser.add_argument("--phase-s", type=float, default=120.0, help="seconds of a phase (default: 120)")
    parser.add_argument("--rounds", type=int, default=2, help="times that all phases come (default: 2)")
    parser.add_argument("--vocab-size", type=int, default=151_000, help="prompt ids are below this (default: 151000)")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for one request (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")
    args = parser.parse_args(argv)
    try:
        args.phases = parse_phases(args.phases)
    except ValueError as error:
        parser.error(f"--phases {error}")
    if args.phase_s <= 0 or min(args.rounds, args.vocab_size) < 1 or len(args.phases) > len(string.ascii_lowercase):
        parser.error("--phase-s: above 0; --rounds and --vocab-size: at least 1; --phases: at most 26")
    args.url = args.url.rstrip("/")
    return args


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 when a request failed or no server answered."""
    args, console = parse_args(argv), Console()
    try:
        return 0 if uvloop.run(run(args, console)) else 1
    except NoServer as error:
        console.print(str(error), style="red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
