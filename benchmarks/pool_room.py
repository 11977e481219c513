"""Number of contexts that fit a pool of KV blocks, by model and length: with groups that lend memory, and without.

    python -m benchmarks.pool_room --bytes 60e9 --lengths 1024,4096,32768 --results benchmarks/results.csv

The layouts are those of workers. Nothing runs, so no GPU is needed.
"""

import argparse
import sys
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.presets import PRESETS, settings
from common.device.engine.step_rules import TYPICAL_TOKENS
from common.models.reading import decoder_config
from common.settings.config import GPU_STEP_TOKENS
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from deploy.bench.workload import numbers

MODELS = "gpt-oss-20b,qwen3.5-4b,gemma3-4b"
LENGTHS = 1024, 4096, 32768
BLOCK_SIZE = 16
MOST_CONTEXTS = 1 << 20


class Fitting(NamedTuple):
    """Contexts that a pool holds at a time."""

    divided: int  # if each group keeps its share
    lent: int  # if groups lend memory to each other


def pool_of(model: str, num_bytes: int) -> PoolShape:
    """Return the pool of a known model in so many bytes, as a worker on a GPU makes it."""
    config = decoder_config(settings(model))
    layout = KVLayout(model, config.cache_groups(BLOCK_SIZE, "bfloat16"))
    return PoolShape.within(num_bytes, layout, TYPICAL_TOKENS, config.max_positions, GPU_STEP_TOKENS)


def fitting(shape: PoolShape, num_tokens: int, beside: Counts = ()) -> Fitting:
    """Return the number of contexts of `num_tokens` that fit, with blocks `beside` them."""
    beside, each = beside or shape.layout.nothing, shape.layout.most_blocks(num_tokens, 1)
    columns = zip(shape.shares, beside, each, strict=True)
    lent = bisect_left(range(MOST_CONTEXTS), True, key=lambda count: not shape.fits(_sum(each, count, beside))) - 1
    return Fitting(min((share - kept) // held for share, kept, held in columns), lent)


def _sum(each: Counts, count: int, beside: Counts) -> Counts:
    return tuple(count * held + kept for held, kept in zip(each, beside, strict=True))


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    rows: list[Row] = []
    table = Table("model", "tokens", "divided", "lent", title=f"contexts in a pool of {args.bytes / 1e9:.1f} GB")
    for model in args.models:
        shape = pool_of(model, int(args.bytes))
        for num_tokens in args.lengths:
            contexts = fitting(shape, num_tokens)
            table.add_row(model, str(num_tokens), *map(str, contexts))
            workload = f"contexts of {num_tokens} tokens in a pool of {args.bytes / 1e9:g} GB"
            figures = (Figure(f"{name}_contexts", count, "contexts") for name, count in contexts._asdict().items())
            rows += [row_of("none", model, workload, figure) for figure in figures]
    Console().print(table)
    if args.results:
        append_rows(args.results, rows)
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool_room",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bytes", type=float, default=60e9, help="bytes of the pool (default: %(default)g)")
    known = f"any of {', '.join(PRESETS)}"
    parser.add_argument("--models", type=_names, default=_names(MODELS), help=f"{known} (default: {MODELS})")
    shown = ",".join(map(str, LENGTHS))
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, help=f"tokens (default: {shown})")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: known are {', '.join(PRESETS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
