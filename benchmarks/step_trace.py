"""Time between two decode steps: idle time of the device, and the host's work for each step.

    python -m benchmarks.step_trace MODEL_DIR [--batches 1,8,64] [--context 1024] [--out DIR]

Runs the decode worker's scheduler, batch and captured graphs like the worker's loop, without sockets. Each step is
launched before the last step's tokens are read. Block tables grow as in service. The gap is the device's idle time
before a step launched ahead of the last step's end.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step import StepBench, add_engine_flags
from benchmarks.own_memory import own_memory, require_gpu
from common.base.percentiles import percentile
from common.base.trace_events import Tracer
from common.base.trace_file import Process, TraceFile
from common.device.steps.loop_trace import WAIT, Trace
from common.device.steps.output_ring import LOOK_INTERVAL_S, PendingOutput
from common.device.steps.step_trace import StepTrace, Summary, device_timer
from common.kv.tables import tables_of
from common.wire.messages.worker_id import make_epoch
from common.wire.values.sampling_params import SamplingParams
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from tests.support.sequences import decode_sequence

WARM_UP_STEPS = 20
MAX_BYTES = 1 << 28
HOST_PHASES = ("apply", "launch", "collect")


class LaunchAhead:
    """Turns of the decode worker's loop, over sequences without an end."""

    def __init__(self, bench: StepBench) -> None:
        self.bench = bench
        self.trace = Trace()
        self.scheduler = DecodeScheduler(bench.engine.allocator, bench.max_rows, bench.engine.max_len)
        self.in_flight: tuple[PendingOutput, list[DecodeSequence]] | None = None

    def enter(self, num_rows: int, context: int, num_steps: int) -> bool:
        """Fill the batch; return False if the batch does not fit.

        Contexts differ, so that not all rows grow at once.
        """
        max_tokens = num_steps + 2
        if not self.bench.fits([context + self.bench.block_size + max_tokens] * num_rows):
            return False
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for row in range(num_rows):
            token_ids = [row + 7] * (context + row % self.bench.block_size)
            sequence = decode_sequence(str(row), token_ids, 0, sampling)
            self.scheduler.reserve(
                sequence, tables_of(self.scheduler.layout, [() for _ in self.scheduler.layout.groups])
            )
            self.scheduler.activate(sequence)
        return True

    def run(self, num_steps: int, trace: Trace) -> None:
        """Launch `num_steps` steps and collect their tokens."""
        self.trace = self.bench.runner.trace = trace
        for _ in range(num_steps):
            with trace.turn():
                self._exchange(self._launch())
        with trace.turn():
            self._exchange(None)

    def leave(self) -> None:
        """Give the blocks back."""
        for sequence in list(self.scheduler.active.values()):
            self.scheduler.end(sequence)
        self.bench.batch.apply(self.scheduler.rows.take_changes())

    def _launch(self) -> tuple[PendingOutput, list[DecodeSequence]]:
        with self.trace.phase("apply"):
            self.scheduler.slots.make()
            assert not self.scheduler.slots.resting, "`enter` saw to it that the pool suffices"
            self.bench.batch.apply(self.scheduler.rows.take_changes())
        with self.trace.phase("launch"):
            return self.bench.runner.launch(len(self.scheduler.rows)), self.scheduler.launched()

    def _exchange(self, launched: tuple[PendingOutput, list[DecodeSequence]] | None) -> None:
        """Collect the step in flight; the launched step takes its place."""
        collected, self.in_flight = self.in_flight, launched
        if collected is None:
            return
        step, sequences = collected
        with self.trace.phase(WAIT):
            while not step.ready():
                time.sleep(LOOK_INTERVAL_S)
        with self.trace.phase("collect"):
            for sequence, token_ids in zip(sequences, step.output().token_ids(), strict=True):
                sequence.token_ids += token_ids
                sequence.num_outputs += len(token_ids)
            self.scheduler.collected(sequences)


def figures(summary: Summary) -> Iterator[Figure]:
    """Yield figures of a traced run; without a device only the host's."""
    if summary.intervals_us:
        gaps_us = sorted(summary.gaps_us)
        yield Figure("step", statistics.median(summary.intervals_us) / 1e3, "ms")
        yield Figure("device_gap_p50", percentile(gaps_us, 50), "us")
        yield Figure("device_gap_p99", percentile(gaps_us, 99), "us")
        yield Figure("steps_launched_late", summary.num_late, "")
    for name in HOST_PHASES:
        yield Figure(f"host_{name}_p50", percentile(summary.phases_us[name], 50), "us")
    yield Figure("host_busy_p99", percentile(summary.busy_us, 99), "us")


def measure(bench: StepBench, num_rows: int, args: argparse.Namespace) -> list[Figure]:
    """Return figures of a batch, empty if the batch does not fit; with `--out`, write a trace as well."""
    loop = LaunchAhead(bench)
    if not loop.enter(num_rows, args.context, WARM_UP_STEPS + args.steps):
        return []
    loop.run(WARM_UP_STEPS, Trace())
    trace = _trace(args.out, Process("steps", f"{num_rows}x{args.context}", make_epoch()), bench.engine.device)
    loop.run(args.steps, trace)
    loop.leave()
    trace.finish()
    return list(figures(trace.summary))


def _trace(directory: Path | None, process: Process, device: torch.device) -> StepTrace:
    """Make a trace with a file in `directory`, or only with sums."""
    if directory is None:
        return StepTrace(Tracer(lambda line: None), device_timer(device))
    file = TraceFile(directory, process, MAX_BYTES)
    return StepTrace(Tracer(file.write), device_timer(device), close=file.close)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_flags(parser, [1, 8, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence (default: 1024)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured (default: 400)")
    parser.add_argument("--device", default="cuda", help="a CPU has no gaps to show (default: cuda)")
    parser.add_argument("--out", type=Path, help="directory for a trace of each batch, for baton trace")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    require_gpu(args.device)
    with own_memory(args.device) as memory:
        bench = StepBench(args, memory, args.device)
        measured = {rows: measure(bench, rows, args) for rows in args.batches}
    names = next((list(found) for found in measured.values() if found), [])
    table = Table(
        "batch", *(f"{each.name} {each.unit}" for each in names), title=f"context {args.context}, {args.steps} steps"
    )
    for num_rows, found in measured.items():
        table.add_row(str(num_rows), *(f"{each.value:.4g}" for each in found) if found else ["does not fit"])
    Console().print(table)
    if args.results:
        append_rows(args.results, [row for rows, found in measured.items() for row in _rows(args, rows, found)])
    return 0


def _rows(args: argparse.Namespace, num_rows: int, found: list[Figure]) -> list[Row]:
    workload = f"decode steps launched ahead, {num_rows} sequences at {args.context} tokens"
    return [row_of(args.hardware, Path(args.model_dir).name, workload, each) for each in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
