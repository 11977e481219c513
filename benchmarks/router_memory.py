"""Memory of the router and its processes, idle and at the peak of each load, process by process.

    python -m benchmarks.router_memory /tmp/Qwen3-4B

Loads are shared with `benchmarks.router`. Streams are not watched, so the processor may be busy otherwise. Each process
is looked at a hundred times a second, and weighed when the sum is near the peak.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.process_memory import Weight, family, resident_bytes, weigh
from benchmarks.router_bodies import LOADS, names
from benchmarks.router_rig import Answers, Clients, Rig, running_router
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure

LOOK_S = 0.01
NOTABLE = 0.9
"""Share of the peak above which processes are weighed: the peak may be over after the weighing."""
START_S, SETTLE_S = 15.0, 2.0
IDLE, AFTER = "nothing, before all loads", "nothing, after all loads"


@dataclass(slots=True)
class Most:
    """Peaks of memory during a load."""

    load: str
    rss_bytes: int = 0  # of all processes together
    pss_bytes: int = 0
    weights: list[Weight] = field(default_factory=list)  # at the peak of PSS
    answers: Answers = field(default_factory=Answers)

    def look(self, pid: int) -> None:
        rss_bytes = sum(map(resident_bytes, family(pid)))
        self.rss_bytes = max(self.rss_bytes, rss_bytes)
        if rss_bytes > NOTABLE * self.rss_bytes:
            weights = weigh(pid)
            if (pss_bytes := sum(each.pss_bytes for each in weights)) > self.pss_bytes:
                self.pss_bytes, self.weights = pss_bytes, weights

    def figures(self) -> list[Figure]:
        """Return figures of all processes together, and by name of process."""
        figures = [Figure("rss", self.rss_bytes / 1e6, "MB"), Figure("pss", self.pss_bytes / 1e6, "MB")]
        for name in dict.fromkeys(each.name for each in self.weights):
            same = [each for each in self.weights if each.name == name]
            figures.append(Figure(f"rss_{name}", sum(each.rss_bytes for each in same) / 1e6, "MB"))
            figures.append(Figure(f"pss_{name}", sum(each.pss_bytes for each in same) / 1e6, "MB"))
        return figures


def watch(rig: Rig, model: str, load: str, seconds: float) -> Most:
    """Return the peaks while clients send a load."""
    most, clients = Most(load), Clients(load, rig.url, model)
    while not clients.started():
        time.sleep(LOOK_S)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        most.look(rig.pid)
        time.sleep(LOOK_S)
    most.answers, _ = clients.stop()
    time.sleep(SETTLE_S)
    return most


def at_rest(rig: Rig, name: str) -> Most:
    most = Most(name)
    most.look(rig.pid)
    return most


def show(console: Console, results: Sequence[Most]) -> None:
    processes = list(dict.fromkeys(each.name for most in results for each in most.weights))
    table = Table(title="RSS / PSS, MB")
    for column in ("beside", "all", *processes, "answers"):
        table.add_column(column, justify="left" if column in ("beside", "answers") else "right")
    for most in results:
        found = {figure.name: figure.value for figure in most.figures()}
        pairs = [(found["rss"], found["pss"])]
        pairs += [(found.get(f"rss_{name}", 0.0), found.get(f"pss_{name}", 0.0)) for name in processes]
        table.add_row(most.load, *(f"{rss:.0f} / {pss:.0f}" for rss, pss in pairs), str(most.answers))
    console.print(table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="directory with tokenizer.json and config.json; weights are not read")
    parser.add_argument("--loads", type=names, default=list(LOADS)[1:], help="as of benchmarks.router (default: all)")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each load lasts (default: 8)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    args = parser.parse_args(argv)
    with running_router(args.model, step_s=0.01) as rig:
        start = Most("nothing, while it starts")
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            start.look(rig.pid)
            time.sleep(LOOK_S)
        results = [start, at_rest(rig, IDLE)]
        results += [watch(rig, args.model, load, args.seconds) for load in args.loads]
        results.append(at_rest(rig, AFTER))
    show(Console(width=170 if not sys.stdout.isatty() else None), results)
    if args.results:
        model = Path(args.model).resolve().name
        rows = [
            row_of(hardware(), model, f"router beside {most.load}", figure)
            for most in results
            for figure in most.figures()
        ]
        append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
