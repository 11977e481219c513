"""Loads one or two OpenAI-compatible servers over HTTP and shows what a client sees.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --concurrency 8 --input-len 1024 --output-len 128

With `--structured` a share of the replies is held to a JSON schema. With `--beside` a second stream of requests runs at
the same time, whose figures are kept apart: short prompts beside long ones, for example. With `--vs` a second server
gets the same prompts in the same run, turn by turn. Prompts are random token ids, so their lengths are exact; a reply
of another length than asked for counts as an error.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.load_client import Target, open_session, run_at, run_concurrent, served_model
from benchmarks.results import Row, append_rows, hardware, row_of
from benchmarks.stats import Figure, RequestRecord, parse_slo, summarize
from benchmarks.workload import (
    Draw,
    Even,
    HeavyTailed,
    Lengths,
    Prompt,
    Stream,
    file_prompts,
    poisson_arrivals,
    random_prompts,
    structured,
)

BUSY_CLIENT = 0.9
"""Share of a core above which the client itself may be what is measured."""


@dataclass(slots=True)
class System:
    """One server under load and what was seen of it."""

    label: str
    url: str
    model: str = ""
    records: list[RequestRecord] = field(default_factory=list)
    beside: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    client_cpu_s: float = 0.0

    def figures(self, slo_ms: dict[str, float]) -> list[Figure]:
        """Of all requests; of those that are held to a schema apart, where others are not."""
        held = [record for record in self.records if record.is_structured]
        free = [record for record in self.records if not record.is_structured]
        figures = summarize(free or held, self.duration_s, slo_ms)
        for name, records in (("structured", held if free else []), ("beside", self.beside)):
            apart = summarize(records, self.duration_s, {}) if records else []
            figures += [Figure(f"{name}_{figure.name}", figure.value, figure.unit) for figure in apart]
        return figures


async def measure(args: argparse.Namespace, systems: list[System], console: Console) -> None:
    """Run every round on every system; fills in `systems`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with open_session() as session:
        with Progress(*columns, console=console) as progress:
            targets = []
            for system in systems:
                system.model = args.model or await served_model(session, system.url, args.deadline_s)
                target = Target(session, system.url, system.model, args.deadline_s)
                targets.append(target)
                await _warm_up(args, target)
            for number in range(args.rounds):
                prompts = _prompts(args, args.num_prompts, _seed(args, f"round {number}"))
                for system, target in zip(systems, targets, strict=True):
                    task = progress.add_task(f"{system.label} {number + 1}/{args.rounds}", total=len(prompts))
                    await _run_round(args, number, system, target, prompts, partial(progress.advance, task))


async def _warm_up(args: argparse.Namespace, target: Target) -> None:
    if args.warmup:
        prompts = _prompts(args, args.warmup, _seed(args, "warm-up"))
        await run_concurrent(target, prompts, min(args.warmup, args.concurrency or 8), lambda: None)


async def _run_round(
    args: argparse.Namespace,
    number: int,
    system: System,
    target: Target,
    prompts: list[Prompt],
    on_end: Callable[[], None],
) -> None:
    started_cpu_s = time.process_time()
    started_s = time.perf_counter()
    if args.concurrency:
        records = await run_concurrent(target, prompts, args.concurrency, on_end)
    else:
        arrivals_s = _arrivals(args, number, len(prompts))
        others, other_arrivals_s = _beside(args, number, arrivals_s[-1])
        records = await run_at(target, prompts + others, arrivals_s + other_arrivals_s, on_end)
    system.duration_s += max(record.ended_s for record in records) - started_s
    system.client_cpu_s += time.process_time() - started_cpu_s
    system.records += records[: len(prompts)]
    system.beside += records[len(prompts) :]


def _arrivals(args: argparse.Namespace, number: int, num_prompts: int) -> list[float]:
    if not args.rate:
        return [0.0] * num_prompts
    return poisson_arrivals(num_prompts, args.rate, _seed(args, f"arrivals of round {number}"))


def _beside(args: argparse.Namespace, number: int, last_s: float) -> tuple[list[Prompt], list[float]]:
    """The second stream: prompts, and arrivals up to the last of the first."""
    if args.beside is None:
        return [], []
    seed = _seed(args, f"beside in round {number}")
    arrivals_s = [
        s for s in poisson_arrivals(int(2 * args.beside.rate * last_s) + 1, args.beside.rate, seed) if s <= last_s
    ]
    return random_prompts(len(arrivals_s), args.beside.lengths, args.vocab_size, seed), arrivals_s


def _prompts(args: argparse.Namespace, num_prompts: int, seed: str) -> list[Prompt]:
    lengths = _lengths(args)
    if args.prompt_file:
        prompts = file_prompts(args.prompt_file, num_prompts, lengths, seed)
    else:
        prompts = random_prompts(num_prompts, lengths, args.vocab_size, seed)
    return structured(prompts, args.structured)


def _lengths(args: argparse.Namespace) -> Lengths:
    fixed = Lengths.fixed(args.input_len, args.output_len)
    return Lengths(args.input_range or fixed.inputs, args.output_range or fixed.outputs)


def _seed(args: argparse.Namespace, part: str) -> str:
    """Every workload has prompts of its own, so that no server finds them in its prefix cache after another one."""
    return f"{args.seed}, {workload_name(args)}, {part}"


# --- what is shown and kept ---------------------------------------------------------------------


def workload_name(args: argparse.Namespace) -> str:
    """Mode, lengths and number of requests in words."""
    if args.workload:
        return str(args.workload)
    mode = f"{args.rate:g} req/s" if args.rate else f"concurrency {args.concurrency}" if args.concurrency else "at once"
    lengths = _lengths(args)
    source = args.prompt_file.name if args.prompt_file else lengths.inputs
    name = f"{mode}, {source}/{lengths.outputs}, {args.num_prompts * args.rounds} requests"
    name += f", {args.structured:.0%} held to a schema" if args.structured else ""
    return f"{name}, beside {args.beside}" if args.beside else name


def show(console: Console, systems: list[System], title: str, slo_ms: dict[str, float]) -> None:
    table = Table(title=title)
    table.add_column("figure")
    for system in systems:
        table.add_column(system.label, justify="right")
    if len(systems) == 2:
        table.add_column("ratio", justify="right")
    for figures in zip(*(system.figures(slo_ms) for system in systems), strict=True):
        name = f"{figures[0].name} {figures[0].unit}".strip()
        cells = [f"{figure.value:,.2f}" if figure.unit else f"{figure.value:,.0f}" for figure in figures]
        if len(figures) == 2:
            cells.append(f"{figures[0].value / figures[1].value:.3f}" if figures[1].value else "-")
        table.add_row(name, *cells)
    console.print(table)
    for system in systems:
        records = system.records + system.beside
        for error, count in Counter(record.error for record in records if record.error).most_common(5):
            console.print(f"{system.label}: {count} x {error}", style="red", markup=False)
        share = system.client_cpu_s / system.duration_s
        if share > BUSY_CLIENT:
            console.print(
                f"{system.label}: this client used {share:.0%} of a core; it may be the bottleneck", style="red"
            )


def rows(args: argparse.Namespace, systems: list[System], slo_ms: dict[str, float]) -> list[Row]:
    """The first system's figures, each beside the other's if there is one."""
    mine, *others = systems
    theirs = {figure.name: figure.value for other in others for figure in other.figures(slo_ms)}
    name, workload = args.hardware or hardware(), workload_name(args)
    return [
        row_of(
            name,
            mine.model,
            workload,
            figure,
            system=mine.label,
            beside=(others[0].label, theirs[figure.name]) if others else None,
        )
        for figure in mine.figures(slo_ms)
    ]


# --- the command line ---------------------------------------------------------------------------


def _draw(text: str) -> Draw:
    if text.startswith("~") and text[1:].isdigit() and int(text[1:]):
        return HeavyTailed(int(text[1:]))
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r}: two lengths or a mean, for example 100-2000 or ~2000")
    return Even(int(low), int(high))


def _stream(text: str) -> Stream:
    try:
        return Stream.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _slo(text: str) -> dict[str, float]:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    _add_system_flags(parser)
    _add_workload_flags(parser)
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for one request (default: 600)")
    parser.add_argument("--slo", type=_slo, default={}, help="limits in ms for goodput: ttft=200,tpot=20,e2e=5000")
    parser.add_argument("--allow-errors", action="store_true", help="exit 0 even if requests failed")
    parser.add_argument("--results", type=Path, help="CSV file to append every figure to")
    parser.add_argument("--workload", help="name of the workload in the results (default: made from the flags)")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")
    args = parser.parse_args(argv)
    if not all(value is None or value > 0 for value in (args.rate, args.concurrency)):
        parser.error("--rate and --concurrency: above 0")
    if not 0 <= args.structured <= 1:
        parser.error("--structured: a share, from 0 to 1")
    if args.beside and not args.rate:
        parser.error("--beside: only with --rate")
    if min(args.num_prompts, args.rounds, args.input_len, args.output_len, args.vocab_size) < 1:
        parser.error("--num-prompts, --rounds, --input-len, --output-len and --vocab-size: at least 1")
    return args


def _add_system_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to load")
    parser.add_argument("--vs", metavar="URL", help="second server, loaded turn by turn with the first")
    parser.add_argument("--system", default="baton", help="label of the first server")
    parser.add_argument("--vs-system", default="other", help="label of the second server")
    parser.add_argument("--model", help="model name to send (default: the first that each server lists)")


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--rate", type=float, help="requests a second, arriving at random (Poisson)")
    mode.add_argument("--concurrency", type=int, help="requests running at any time")
    mode.add_argument("--all-at-once", action="store_true", help="send everything at the start")
    parser.add_argument("--num-prompts", type=int, default=100, help="requests a round (default: 100)")
    parser.add_argument("--rounds", type=int, default=1, help="times each server gets its turn (default: 1)")
    parser.add_argument("--warmup", type=int, default=8, metavar="N", help="uncounted requests first (default: 8)")
    parser.add_argument("--input-len", type=int, default=1024, help="prompt tokens (default: 1024)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument(
        "--input-range", type=_draw, metavar="DRAWN", help="prompt tokens: LOW-HIGH, or ~MEAN (heavy-tailed)"
    )
    parser.add_argument("--output-range", type=_draw, metavar="DRAWN", help="the same of output tokens")
    parser.add_argument(
        "--beside",
        type=_stream,
        metavar="RATE:INPUT/OUTPUT",
        help="another stream, such as 20:128/8, kept apart",
    )
    parser.add_argument(
        "--structured",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the replies are held to a JSON schema: 0 to 1",
    )
    parser.add_argument("--vocab-size", type=int, default=151_000, help="prompt ids are below this (default: 151000)")
    parser.add_argument("--prompt-file", type=Path, help="texts instead of random ids: one a line, or JSONL")
    parser.add_argument(
        "--seed", type=int, default=0, help="another one draws other prompts, which no prefix cache knows (default: 0)"
    )


def main(argv: list[str]) -> int:
    """Exit code 1 when a request failed and that was not allowed."""
    args = parse_args(argv)
    console = Console()
    systems = [System(args.system, args.url.rstrip("/"))]
    if args.vs:
        systems.append(System(args.vs_system, args.vs.rstrip("/")))
    uvloop.run(measure(args, systems, console))
    show(console, systems, workload_name(args), args.slo)
    if args.results:
        append_rows(args.results, rows(args, systems, args.slo))
    failed = any(record.error for system in systems for record in system.records + system.beside)
    return 1 if failed and not args.allow_errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
