"""Loads one or two OpenAI-compatible servers over HTTP and shows what a client sees.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --concurrency 8 --input-len 1024 --output-len 128

`--prefixes` and `--users` exercise a prefix cache. With `--prefixes` prompts share beginnings; with `--users` each
prompt is a turn of a conversation. With `--structured` a share of the replies must follow a JSON schema. With
`--beside` a second stream of requests runs at the same time, with figures apart: short prompts beside long ones, for
example. With `--vs` a second server gets the same prompts in the same run, turn by turn. Prompts are random token ids
or words, so the lengths are exact. A reply of a wrong length counts as an error.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import uvloop
from rich.console import Console
from rich.table import Table

from deploy.bench.client import (
    NoServer,
    OnEnd,
    Target,
    open_session,
    run_at,
    run_concurrent,
    run_conversations,
    served_model,
)
from deploy.bench.live import Live, progress_on
from deploy.bench.load import Load
from deploy.bench.moved import Moved
from deploy.bench.options import USUAL, Defaults, parse_args
from deploy.bench.origin import hardware
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure, RequestRecord, summarize

Sent = tuple[list[RequestRecord], list[RequestRecord]]
"""Records of a round's requests, and of the requests beside."""
AT_FIRST = 8
"""Concurrent requests outside the counted rounds."""
INSTALL_PLOTS = 'matplotlib is not installed: pip install -c constraints.txt -e ".[bench]" where the sources are'
BUSY_CLIENT = 0.9
"""Share of a core above which the client itself may be the bottleneck."""


@dataclass(slots=True)
class System:
    """A server under load, and its measurements."""

    label: str
    url: str
    model: str = ""
    api_key: str = ""
    started_by: str = ""
    records: list[RequestRecord] = field(default_factory=list)
    beside: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    moved: Moved = field(default_factory=Moved)

    def figures(self, slo_ms: dict[str, float]) -> list[Figure]:
        """Return figures of all requests, then apart for structured replies, later turns and `beside`.

        With both structured and free replies, the overall figures cover the free replies only.
        """
        held = [record for record in self.records if record.is_structured]
        free = [record for record in self.records if not record.is_structured]
        later = [record for record in self.records if record.turn]
        figures = [*summarize(free or held, self.duration_s, slo_ms), *self.moved.figures()]
        for name, records in (
            ("structured", held if free else []), ("later_turns", later), ("beside", self.beside),
        ):  # fmt: skip
            apart = summarize(records, self.duration_s, {}) if records else []
            figures += [Figure(f"{name}_{figure.name}", figure.value, figure.unit) for figure in apart]
        return figures


async def measure(args: argparse.Namespace, load: Load, systems: list[System], console: Console) -> None:
    """Run every round on every system, and fill in the measurements of `systems`."""
    async with open_session() as session:
        with progress_on(console) as progress:
            targets = []
            for system in systems:
                system.model = args.model or await served_model(session, system.url, args.deadline_s, system.api_key)
                targets.append(Target(session, system.url, system.model, args.deadline_s, system.api_key))
                await run_concurrent(targets[-1], load.warm_up(), args.concurrency or AT_FIRST, lambda record: None)
            for number in range(args.rounds):
                send_round = _round(args, load, number)
                for system, target in zip(systems, targets, strict=True):
                    for uncounted in (load.primers(number), load.crowd(number)):
                        records = await run_concurrent(target, uncounted, AT_FIRST, lambda record: None)
                        system.records += [record for record in records if record.error]
                    live = Live(progress, f"{system.label} {number + 1}/{args.rounds}", args.num_prompts)
                    await system.moved.begin(session, system.url)
                    await _note_round(system, send_round(target, live.note))
                    await system.moved.end(session, system.url)


async def _note_round(system: System, sent: Awaitable[Sent]) -> None:
    started_cpu_s = time.process_time()
    started_s = time.perf_counter()
    records, beside = await sent
    system.duration_s += max(record.ended_s for record in records + beside) - started_s
    system.client_cpu_s += time.process_time() - started_cpu_s
    system.records += records
    system.beside += beside


def _round(args: argparse.Namespace, load: Load, number: int) -> Callable[[Target, OnEnd], Awaitable[Sent]]:
    """Make the load of a round beforehand; the returned function sends an equal load to each system."""
    if args.users:
        talks = load.conversations(number)
        return lambda target, on_end: _alone(run_conversations(target, talks, on_end))
    prompts = load.prompts(number)
    if args.concurrency:
        return lambda target, on_end: _alone(run_concurrent(target, prompts, args.concurrency, on_end))
    arrivals_s = load.arrivals_s(number, len(prompts))
    others, other_arrivals_s = load.beside(number, arrivals_s[-1])

    async def at_times(target: Target, on_end: OnEnd) -> Sent:
        records = await run_at(target, prompts + others, arrivals_s + other_arrivals_s, on_end)
        return records[: len(prompts)], records[len(prompts) :]

    return at_times


async def _alone(sent: Awaitable[list[RequestRecord]]) -> Sent:
    """Return the records, with none beside."""
    return await sent, []


# --- display and results ------------------------------------------------------------------------


def measured(systems: list[System], slo_ms: dict[str, float]) -> list[tuple[Figure, ...]]:
    """Return each figure of all systems in order, unless no system has a value."""
    same = zip(*(system.figures(slo_ms) for system in systems), strict=True)
    return [figures for figures in same if not all(math.isnan(figure.value) for figure in figures)]


def show(console: Console, systems: list[System], title: str, slo_ms: dict[str, float]) -> None:
    table = Table(title=title)
    table.add_column("figure")
    for system in systems:
        table.add_column(system.label, justify="right")
    if len(systems) == 2:
        table.add_column("ratio", justify="right")
    for figures in measured(systems, slo_ms):
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


def rows(name: str, workload: str, systems: list[System], slo_ms: dict[str, float]) -> list[Row]:
    """Make rows of the first system's figures on `name` hardware, each beside the second system's figure, if any."""
    return [
        row_of(
            name,
            systems[0].model,
            workload,
            mine,
            system=systems[0].label,
            beside=(systems[1].label, theirs[0].value) if theirs else None,
            started=(systems[0].started_by, systems[1].started_by if theirs else ""),
        )
        for mine, *theirs in measured(systems, slo_ms)
    ]


def main(argv: list[str], prog: str = "python -m benchmarks.serve", defaults: Defaults = USUAL) -> int:
    """Run the benchmark; return 1 when a request failed without `--allow-errors`."""
    args, console = parse_args(argv, (__doc__ or "").splitlines()[0], prog, defaults), Console()
    if args.plot and find_spec("matplotlib") is None:
        console.print(f"--plot: {INSTALL_PLOTS}", style="red", markup=False, soft_wrap=True)
        return 2
    try:
        load = Load(args)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    systems = [System(args.system, args.url.rstrip("/"), api_key=args.api_key or "", started_by=args.started_by)]
    if args.vs:
        systems.append(System(args.vs_system, args.vs.rstrip("/"), started_by=args.vs_started_by))
    try:
        uvloop.run(measure(args, load, systems, console))
    except NoServer as error:
        console.print(str(error), style="red", markup=False)
        return 1
    show(console, systems, load.name, args.slo)
    if args.plot:
        from deploy.bench.plot import Seen, plot

        plot(args.plot, load.name, [Seen(system.label, system.records) for system in systems])
        console.print(f"drawn: {args.plot}", markup=False)
    if args.results:
        append_rows(args.results, rows(args.hardware or hardware(), load.name, systems, args.slo))
    failed = any(record.error for system in systems for record in system.records + system.beside)
    return 1 if failed and not args.allow_errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
