"""Cost and gain of a state's snapshot in a prompt, by length, for models with states, without a server.

    python -m benchmarks.snapshots MODEL_DIR [--lengths 1024,8192] [--device cpu]

Times a prompt whole, with a snapshot at the last full block, and resumed from the snapshot. The gain is the time of a
whole prompt less that of a resumed one. The cost is a further step for the last tokens, and the copy.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.own_memory import own_memory, require_gpu, separate, usual
from benchmarks.prompt_step import PromptBench, median_ms, run
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from deploy.bench.origin import hardware
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from deploy.bench.workload import numbers

LENGTHS = [512, 1024, 4096, 16_000]


class SnapshotTimes(NamedTuple):
    """Milliseconds of a prompt from the launch to the first token."""

    whole: float
    snapshot: float  # with a snapshot at the last full block
    resumed: float  # from that snapshot


class SnapshotBench:
    """Prompts of a prefill worker, with and without a snapshot."""

    def __init__(self, bench: PromptBench) -> None:
        self.bench, shape = bench, bench.engine.pool.shape
        self.layout = shape.layout
        blocks = separate(shape, usual(shape))
        self.copies = [(blocks[n][0], blocks[n][1]) for n in self.layout.states]  # a prompt's states are in the first
        self.num_bytes = sum(self.layout.groups[number].block_bytes for number in self.layout.states)

    def times(self, runner: PromptRunner, num_tokens: int) -> SnapshotTimes:
        whole = self.bench.chunks(num_tokens)
        cut = self.cut(whole, num_tokens)
        found = [(snapshot, state) for state, snapshot in self.copies]
        versions = (whole, cut, [replace(cut[-1], found_states=found)])
        return SnapshotTimes(*(median_ms(partial(run, runner, chunks, whole_gpu=True)) for chunks in versions))

    def cut(self, chunks: list[PromptChunk], num_tokens: int) -> list[PromptChunk]:
        """Return the chunks of a prompt, cut at its last full block, with a snapshot there."""
        end = (num_tokens - 1) // self.layout.block_size * self.layout.block_size
        *before, last = chunks
        at = end - last.start
        if at <= 0:  # the chunk before ends there
            return [*before[:-1], replace(before[-1], snapshots=self.copies), last]
        head = replace(last, token_ids=last.token_ids[:at], is_last=False, snapshots=self.copies)
        return [*before, head, replace(last, token_ids=last.token_ids[at:], start=end)]


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.snapshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir")
    shown = ",".join(map(str, LENGTHS))
    parser.add_argument(
        "--lengths", type=numbers, default=LENGTHS, help=f"tokens, separated by commas (default: {shown})"
    )
    parser.add_argument("--chunk", type=int, default=8192, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", default=hardware(), help="in the results (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if args.device.startswith("cuda"):
        require_gpu(args.device)
    with own_memory(args.device) as memory:
        bench = SnapshotBench(PromptBench(args.model_dir, args.chunk, memory, args.device))
        if not bench.copies:
            raise SystemExit(f"{args.model_dir} has no states, so its prompts need no snapshots")
        rows = measure(args, bench)
    if args.results:
        append_rows(args.results, rows)
    return 0


def measure(args: argparse.Namespace, bench: SnapshotBench) -> list[Row]:
    """Time and print every length, and return the result rows."""
    title = f"a snapshot of {bench.num_bytes / 1e6:.2f} MB at the last full block of a prompt"
    table, rows = Table("tokens", "whole, ms", "with a snapshot, ms", "cost, ms", "resumed, ms", title=title), []
    runner = bench.bench.runner(100)
    for num_tokens in args.lengths:
        if not bench.bench.fits(num_tokens):
            print(f"{num_tokens} tokens do not fit, skipped")
            continue
        times = bench.times(runner, num_tokens)
        cost_ms = times.snapshot - times.whole
        table.add_row(str(num_tokens), *(f"{ms:.2f}" for ms in (*times[:2], cost_ms, times.resumed)))
        workload = f"prompt alone, {num_tokens} tokens, a snapshot of {bench.num_bytes / 1e6:.2f} MB"
        figures = (Figure(name, ms, "ms") for name, ms in times._asdict().items())
        rows += [row_of(args.hardware, Path(args.model_dir).name, workload, figure) for figure in figures]
    Console().print(table)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
