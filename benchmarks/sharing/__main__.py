"""Speed of prompt steps and decode steps that share a GPU, and the cost of turns and of switches between shares.

    python -m benchmarks.sharing MODEL_DIR [--rows 8,64,256] [--tokens 512,2048,8192] [--lefts 0,12,28,20,44]

Measures the workers' own steps in two processes under MPS, as `baton serve` places them. A prompt leaves `--lefts`
multiprocessors to decode steps; 0 is the whole GPU, overlapped. Each kind of step is measured alone, beside each of the
other, and in turns with it. In a turn the prompt is alone on the whole GPU, and a decode step follows. The cost of a
turn is what its two steps alone do not take.

A cell that fails, or hangs beyond its deadline, is left out, and both processes begin anew. The benchmark ends in time
with the cells measured until then; cells that others are compared with come first.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console as Terminal
from rich.table import Table

from benchmarks.own_memory import require_gpu
from benchmarks.sharing.grid import CONTEXT, figures, grid, rows_of
from benchmarks.sharing.pair import Bench, Pair
from common.base.errors import ConfigError
from common.wire.messages.worker import Role
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows
from deploy.bench.workload import numbers
from deploy.processes.console import Console
from deploy.processes.mps import environs_under_mps
from deploy.processes.placement import Gpu, Placement

ROWS, TOKENS, LEFTS = [8, 64, 256], [512, 2048, 8192], [0, 12, 28, 20, 44]


class Begin:
    """Starts the processes of a benchmark, each with its environment under MPS."""

    def __init__(self, args: argparse.Namespace, environs: Mapping[str, Mapping[str, str]], page: Path) -> None:
        self._environs, self._page = environs, page
        rows, tokens = (",".join(map(str, counts)) for counts in (args.rows, args.tokens))
        self._commands = {
            name: [sys.executable, "-m", "benchmarks.sharing.side", name, args.model_dir, args.device, rows, tokens,
                   str(args.context), str(page)]
            for name in ("decode", "prompt")
        }  # fmt: skip

    def __call__(self) -> Pair:
        self._page.write_bytes(b"\0")
        return Pair(self._commands, self._environs, self._page)


async def run(args: argparse.Namespace) -> Bench:
    """Run all cells under MPS, on a CPU without."""
    end_s, gpu = time.monotonic() + args.deadline_s, None if args.device == "cpu" else Gpu(0, 0)
    placements = [Placement("prompt", Role.PREFILL, gpu), Placement("decode", Role.DECODE, gpu)]
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/dev/shm") as shared, tempfile.TemporaryDirectory() as place:
        async with environs_under_mps(placements, Path(place), Console(sys.stderr, None)) as environs:
            bench = Bench(Begin(args, environs, Path(shared) / "page"), end_s)
            await asyncio.to_thread(bench.run, grid(args.rows, args.tokens, args.lefts, args.context))
    return bench


def show(terminal: Terminal, bench: Bench) -> None:
    """Print the figures of each measured cell, and what is left out."""
    table = Table("steps", "figure", "ms", "alone, ms", title="prompts and decode steps on one GPU")
    for cell, times in bench.measured.items():
        for figure, alone in figures(cell, times, bench.measured):
            told = "" if alone is None else f"{alone:.2f}"
            table.add_row(cell.workload.removeprefix("sharing, "), figure.name, f"{figure.value:.2f}", told)
    terminal.print(table)
    for cell, problem in bench.problems.items():
        terminal.print(f"left out: {cell.workload}: {problem}", style="red", highlight=False)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir")
    for flag, default, what in (
        ("--rows", ROWS, "of decode steps"),
        ("--tokens", TOKENS, "of prompt steps"),
        ("--lefts", LEFTS, "multiprocessors left to decode steps"),
    ):
        shown = ",".join(map(str, default))
        parser.add_argument(flag, type=numbers, default=default, help=f"{what}, separated by commas (default: {shown})")
    parser.add_argument(
        "--device", default="cuda:0", help="cpu proves no more than that it runs (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=CONTEXT,
        help="tokens of a row, and of each prompt of a step (default: %(default)s)",
    )
    parser.add_argument("--deadline-s", type=float, default=220.0, help="seconds for all (default: %(default)g)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", default=hardware(), help="in the results (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    require_gpu(args.device)
    args.model_dir = str(Path(args.model_dir).resolve())
    try:
        bench = asyncio.run(run(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    show(Terminal(), bench)
    if args.results:
        append_rows(args.results, rows_of(args.hardware, Path(args.model_dir).name, bench.measured))
    return 1 if bench.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
