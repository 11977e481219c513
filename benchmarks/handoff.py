"""Time of a handoff of a prompt's KV blocks, by prompt length, without a server.

    python -m benchmarks.handoff [--source cuda:0 --target cuda:1] [--lengths 1024,8192]

Uses the workers' own transports, pools and layout. Another process (`handoff_exporter`) owns the source, as a prefill
worker does. Every byte is compared once for each length before the timing.
"""

import argparse
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.presets import PRESETS
from benchmarks.pulls import HandoffBench, Timing
from common.base.errors import BatonError, TransferFailed
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.wire.messages.frames import decode, encode
from common.wire.messages.handoff import KVPoolExport
from common.wire.messages.memory import PoolWanted
from common.wire.values.kv_layout import DTYPE_BYTES, KVLayout
from deploy.bench.origin import ROOT, hardware
from deploy.bench.results import Row, append_rows, row_of

LENGTHS = [128, 512, 1024, 2048, 4096, 8192, 16384, 32768]
MIN_POOL_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
"""More than a GPU's cache, so that pulls of short prompts find no cached blocks."""
EXPORT_DEADLINE_S = 120.0
END_DEADLINE_S = 10.0


@contextmanager
def exporter(device: str, num_blocks: int, layout: KVLayout, *flags: str) -> Iterator[KVPoolExport]:
    """Start a process with a filled pool and yield the pool's export; raises TransferFailed after a timeout.

    Args:
        flags: further arguments of `handoff_exporter`.
    """
    wanted = encode(PoolWanted(layout, (num_blocks,)))
    command = [sys.executable, "-m", "benchmarks.handoff_exporter", device, wanted.hex(), *flags]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            is_there, _, _ = select.select([process.stdout], [], [], EXPORT_DEADLINE_S)
            line = process.stdout.readline() if is_there else ""
            if not line:
                how = f"within {EXPORT_DEADLINE_S:g} s" if not is_there else "by the process that should, which ended"
                raise TransferFailed(f"no pool was exported on {device} {how}")
            export = decode(bytes.fromhex(line))
            assert isinstance(export, KVPoolExport)
            yield export
        finally:
            process.stdin.close()
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def layout_of(preset: str, num_layers: int | None, block_size: int, dtype: str) -> KVLayout:
    """Return the KV layout of a known model."""
    changes = {"num_hidden_layers": num_layers} if num_layers else {}
    config = decoder_config(Settings(PRESETS[preset] | changes, preset))
    return KVLayout(preset, config.cache_groups(block_size, dtype))


def show(console: Console, timings: list[Timing], title: str) -> None:
    headers = ("tokens", "MB", "pull ms", "p99 ms", "GB/s", "device ms", "device GB/s", "call us")
    table = Table(title=title)
    for header in headers:
        table.add_column(header, justify="right")
    for timing in timings:
        seen = {
            figure.name: f"{figure.value:,.3f}" if figure.unit == "ms" else f"{figure.value:,.1f}"
            for figure in timing.figures()
        }
        names = ("pull_p50", "pull_p99", "rate", "device", "device_rate", "call")
        table.add_row(
            f"{timing.num_tokens}", f"{timing.num_bytes / 1e6:,.1f}", *(seen.get(name, "-") for name in names)
        )
    console.print(table)


def rows(args: argparse.Namespace, timings: list[Timing]) -> list[Row]:
    name, where = args.hardware or hardware(), f"{args.source} to {args.target}"
    return [
        row_of(
            name,
            args.preset,
            f"handoff of {timing.num_tokens} tokens ({timing.num_bytes / 1e6:.1f} MB), {where}",
            figure,
        )
        for timing in timings
        for figure in timing.figures()
    ]


def _lengths(text: str) -> list[int]:
    lengths = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of tokens, for example 128,1024")
    return lengths


def parse_args(argv: list[str]) -> argparse.Namespace:
    default_device = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--source", default=default_device, help="cuda:N or cpu, of the pool pulled from (default: %(default)s)"
    )
    parser.add_argument("--target", help="cuda:N or cpu, of the pool pulled into (default: the source's)")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="prompt tokens, separated by commas")
    parser.add_argument("--repeats", type=int, default=50, help="timed pulls of each length (default: 50)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-4b", help="model (default: qwen3-4b)")
    parser.add_argument("--num-layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (default: 16)")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="of K and V (default: bfloat16)"
    )
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")
    args = parser.parse_args(argv)
    args.target = args.target or args.source
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least 1")
    if args.source.split(":")[0] != args.target.split(":")[0]:
        parser.error(f"--source {args.source} --target {args.target}: two GPUs, one GPU, or cpu for both")
    return args


def run(args: argparse.Namespace, console: Console) -> list[Timing]:
    """Verify and time every length; raises BatonError if no pull is possible or wrong bytes arrive."""
    device = torch.device(args.target)
    layout = layout_of(args.preset, args.num_layers, args.block_size, args.dtype)
    [group] = layout.groups
    num_blocks = max(group.num_places(max(args.lengths)), MIN_POOL_BYTES[device.type] // group.block_bytes)
    timings = []
    with exporter(args.source, num_blocks, layout) as export, closing(HandoffBench(export, device)) as bench:
        for num_tokens in track(args.lengths, "pulling", console=console, transient=True):
            bench.verify(group.num_places(num_tokens))
            timings.append(bench.measure(num_tokens, args.repeats))
    return timings


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 if no pull was possible or wrong bytes arrived."""
    args = parse_args(argv)
    console = Console()
    try:
        timings = run(args, console)
    except BatonError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 1
    show(console, timings, f"handoff of {args.preset} KV blocks, {args.source} to {args.target}")
    if args.results:
        append_rows(args.results, rows(args, timings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
