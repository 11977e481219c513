"""Cost of tracing on the host for a turn of a decode worker's loop.

    python -m benchmarks.trace_cost [--device cuda] [--turns 20000] [--results FILE --hardware NAME]

A turn has the phases of a real turn, all empty. On a GPU the turn's step is two CUDA events, looked at in later turns.
The trace goes to a file, as in service.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common.base.trace_file import Process
from common.device.steps.loop_trace import WAIT, Trace
from common.device.steps.step_trace import make_trace
from common.settings.observation_sections import TraceSection
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure

PHASES_BEFORE, PHASES_AFTER = ("receive", WAIT, "apply"), (WAIT, "collect", "emit", "local prompt")
REST_TURNS, REST_S = 200, 2e-3
"""Turns between two rests; a rest lets the writing thread run, as a wait for the device does."""


def turn(trace: Trace) -> None:
    """Run a turn that launches a step."""
    with trace.turn():
        for name in PHASES_BEFORE:
            with trace.phase(name):
                pass
        with trace.phase("launch"), trace.device(64, "rows"):
            pass
        for name in PHASES_AFTER:
            with trace.phase(name):
                pass


def median_us(act: Callable[[], None], num_times: int) -> float:
    """Return the median time of `num_times` calls."""
    took_us = []
    for number in range(num_times):
        begin_s = time.perf_counter()
        act()
        took_us.append((time.perf_counter() - begin_s) * 1e6)
        if number % REST_TURNS == 0:
            time.sleep(REST_S)
    return statistics.median(took_us)


def figures(directory: Path, device: torch.device, num_turns: int) -> Iterator[Figure]:
    """Yield figures of a turn, off and on."""
    section = TraceSection(dir=str(directory))
    yield Figure("turn_untraced", median_us(lambda: turn(Trace()), num_turns), "us")
    traced = make_trace(section, Process("decode", "decode-0", 1), device)
    yield Figure("turn_traced", median_us(lambda: turn(traced), num_turns), "us")
    traced.finish()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for steps with events (default: cpu)")
    parser.add_argument("--turns", type=int, default=20_000, help="of each kind (default: 20000)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", default="", help="what it ran on, for the rows")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        found = list(figures(Path(directory), torch.device(args.device), args.turns))
    table = Table("figure", "p50, us", title=f"tracing, {args.device}")
    for each in found:
        table.add_row(each.name, f"{each.value:.1f}")
    Console().print(table)
    if args.results:
        rows: list[Any] = [row_of(args.hardware, "none", f"tracing, {args.device}", each) for each in found]
        append_rows(args.results, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
