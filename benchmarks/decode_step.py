"""Time of a decode step on the GPU, by batch and context, without a server.

    python -m benchmarks.decode_step MODEL_DIR [--batches 1,8,64] [--contexts 1024] [--profile]
    python -m benchmarks.decode_step MODEL_DIR --mixes 64x1024+1x32768,256~2048

Uses the decode worker's own engine, batch and captured graphs. Without more flags: every batch of 1 to 256 at every
context of 128 to 32,768 tokens that fits in the pool. A mix has contexts of different lengths. Each mix is measured
beside a batch of equal contexts, with equally many sequences and keys. The floor is the time to read the weights once
and the KV of every sequence, at this GPU's read bandwidth of today. `--profile` lists the kernels of a step by time.
`--quantization` quantizes the model at load, and the floor counts its bytes.
`--asks` adds penalties, log-probabilities or grammars to every row. `--sms` limits a step to the multiprocessors left
beside a prompt. With `--shared` all contexts begin with the same blocks. A step that reads shared blocks once is then
measured beside a step that reads the blocks for each row.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.context_mix import ContextMix, parse_mix, uniform
from benchmarks.kernels import read_ceiling
from benchmarks.model_flags import add_quantization, served_as
from benchmarks.own_memory import own_memory, require_gpu, separate, take_all
from common.device.engine.engine import Engine, build_engine
from common.device.engine.gpu_share import limited_stream
from common.device.steps.output_ring import PendingOutput
from common.kv.tables import BlockTable
from common.memory.client.client import MemoryClient
from common.settings.config import (
    Config,
    DecodeSection,
    KernelsSection,
    ModelSection,
    WorkerSection,
)
from common.settings.memory_sections import KV_DTYPES, KVSection
from common.wire.values.kv_layout import Counts, KVGroup
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.batch.runner import CAPTURE_BYTES, DecodeRunner
from decode_worker.sequences.rows import NO_SLOT, UNSHARED, Change, Fill, SharedPrefix
from deploy.bench.origin import hardware
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from deploy.bench.workload import numbers
from tests.support.sequences import decode_sequence

STEPS = 40
WARM_UP_STEPS = 5
MORE_TOKENS = STEPS + WARM_UP_STEPS + 1  # behind a context, by the end
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [128, 1024, 4096, 8192, 32_768]
ASKS = {
    "nothing": SamplingParams(temperature=0.0),
    "penalties": SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1),
    "logprobs": SamplingParams(temperature=0.0, num_logprobs=6),
    "grammar": SamplingParams(temperature=0.0, grammar="its masks are made up"),
    "both": SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1, num_logprobs=6),
}


def _num_held(group: KVGroup, num_tokens: int) -> int:
    """Return the blocks that a sequence needs to grow to `num_tokens` tokens by MORE_TOKENS steps."""
    return group.num_places(num_tokens) - group.first_seen(max(0, num_tokens - MORE_TOKENS))


def _scattered(block_ids: list[int]) -> Iterator[int]:
    """Return an iterator over blocks in random order."""
    order = torch.randperm(len(block_ids), generator=torch.Generator().manual_seed(len(block_ids)))
    return (block_ids[index] for index in order.tolist())


def _fill(cache: torch.Tensor) -> None:
    """Fill a cache with numbers of about 1."""
    if cache.dtype == torch.float8_e4m3fn:
        cache.view(torch.uint8).random_(0x20, 0x40)
    else:
        cache.normal_()


class StepBench:
    """A decode worker's engine filled with made-up sequences; `args` as by `add_engine_flags`.

    Args:
        pool_bytes: as `kv.pool_bytes`; 0 is what workers have room for.
    """

    def __init__(self, args: argparse.Namespace, memory: MemoryClient, device: str, pool_bytes: int = 0) -> None:
        self.max_rows = max(args.batches)
        config = Config(
            model=ModelSection(path=args.model_dir, quantization=args.quantization, head=args.head),
            worker=WorkerSection(device=device),
            decode=DecodeSection(max_num_seqs=self.max_rows),
            kv=KVSection(dtype=args.kv_dtype, pool_bytes=pool_bytes),
            kernels=KernelsSection(pdl=not args.no_pdl, linear="torch" if args.cublas else "triton"),
        )
        self.engine: Engine = build_engine(config, memory, step_tokens=2048, logit_rows=self.max_rows)
        take_all(self.engine.shared)
        for cache in self.engine.pool.caches:
            _fill(cache)  # contexts differ, as then do the experts that their tokens choose
        self.block_size = config.kv.block_size
        engine = self.engine
        self.batch = DecodeBatch(self.max_rows, engine.max_len, engine.pool.shape, engine.vocab_size, engine.device)
        self.runner = DecodeRunner(self.engine, self.batch, self.max_rows, use_graphs=True)
        self.runner.buckets = sorted(args.batches)
        self.runner.prepare(self.runner.buckets)
        self.generator = torch.Generator(engine.device).manual_seed(0)
        self.sampling = ASKS["nothing"]  # of every row
        self.prefix = UNSHARED  # start of all contexts
        self.reads_once = False

    def fill(self, contexts: Sequence[int]) -> bool:
        """Give every row a context of scattered blocks; False if a context is too long or the pool too small."""
        lengths = [context + MORE_TOKENS for context in contexts]
        if not self.fits(lengths):
            return False
        pool = self.engine.pool
        ids = list(map(_scattered, separate(pool.shape, self._counts(lengths))))
        shared = list(islice(ids[0], self.prefix.num_tokens // self.block_size))
        changes: list[Change] = []
        for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
            tables = []
            for group, of_group in zip(pool.layout.groups, ids, strict=True):
                known = shared if group is pool.layout.groups[0] else []
                own = islice(of_group, _num_held(group, length) - len(known))
                tables.append(BlockTable(group, chain(known, own), group.first_seen(context)))
            self._set_states(tables, context - 1)
            sequence = decode_sequence("bench", [row + 7] * context, 1, self.sampling, tables)
            sequence.mask_slot.place = row if self.sampling.grammar else -1
            slot = row if self.sampling.adjusts_logits else NO_SLOT
            changes.append(Fill(row, sequence, state_slot=slot, prefix=self.prefix))
        self.batch.apply(changes)
        self.batch.grammars.masks_cpu.fill_(-1)
        self.batch.grammars.positions_cpu[: len(contexts)] = torch.tensor(contexts, dtype=torch.int32)
        return True

    def _set_states(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Have the states of a sequence, if any, be those after `num_tokens` tokens."""
        pool = self.engine.pool
        for cache, table, first in zip(pool.caches, tables, pool.shape.begins, strict=True):
            if not table.group.grows:
                state = cache[table.block_ids[0] - first]
                state.normal_()
                state[0, 0, 0, -1, 0] = num_tokens

    def fits(self, lengths: Sequence[int]) -> bool:
        """Tell whether the pool holds sequences of such lengths, and the model allows them."""
        return self.engine.pool.shape.fits(self._counts(lengths)) and max(lengths) <= self.engine.max_len

    def _counts(self, lengths: Sequence[int]) -> Counts:
        """Return the blocks of sequences of such lengths, by group."""
        return tuple(sum(_num_held(group, each) for each in lengths) for group in self.engine.pool.layout.groups)

    def launch(self, num_rows: int) -> PendingOutput:
        """Launch a step with the present sampling."""
        has_logprobs = self.sampling.num_logprobs > 0
        return self.runner.launch(num_rows, has_logprobs=has_logprobs, spared_bytes=CAPTURE_BYTES * self.reads_once)

    def draw_tokens(self, num_rows: int) -> None:
        """Give every row a random token, because a model of random weights tells all rows the same after a few steps.

        Rows of one token would choose the same experts, and a step would read few.
        """
        self.batch.state.token_ids[:num_rows].random_(self.engine.vocab_size, generator=self.generator)

    def find_masks(self) -> None:
        """Advance the grammars' positions, as if the masks of the next step were ready."""
        self.batch.grammars.positions_cpu.add_(1)

    def median_ms(self, num_rows: int) -> float:
        """Return the median time of a step, by events on the stream."""
        times = []
        for i in range(STEPS + WARM_UP_STEPS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.draw_tokens(num_rows)
            begin.record()
            self.launch(num_rows)
            end.record()
            end.synchronize()
            self.find_masks()
            if i >= WARM_UP_STEPS:
                times.append(begin.elapsed_time(end))
        return float(statistics.median(times))

    def floor_ms(self, contexts: Sequence[int], bytes_per_s: float) -> float:
        """Return the time to read needed weights, all keys and values in sight, and the states of all rows, once."""
        groups, num_rows, model = self.engine.pool.layout.groups, len(contexts), self.engine.model
        num_bytes = model.config.step_bytes(num_rows, model.zeros(1).rows.element_size())
        for group in groups:
            if group.grows:
                seen = (min(context, group.window or context) for context in contexts)
                num_bytes += sum(seen) * group.token_bytes
            else:
                num_bytes += num_rows * 2 * group.block_bytes  # read and written
        return num_bytes / bytes_per_s * 1e3

    def profile(self, num_rows: int) -> str:
        """Return a table of a step's kernels by time; a profiler shows graph nodes as kernels."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(5):
                self.draw_tokens(num_rows)
                self.launch(num_rows)
                torch.cuda.synchronize()
                self.find_masks()
        return str(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))


@contextmanager
def confined(num_sms: int) -> Iterator[None]:
    """Limit all work and captures inside to `num_sms` multiprocessors; 0 is all."""
    if num_sms == 0:
        yield
        return
    stream = limited_stream(num_sms, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.graph.default_capture_stream = stream
    with torch.cuda.stream(stream):
        yield


def mixes(text: str) -> list[ContextMix]:
    try:
        return [parse_mix(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_engine_flags(parser: argparse.ArgumentParser, batches: list[int]) -> None:
    """Add the flags behind `StepBench` and its result rows; `batches` is the default of `--batches`."""
    parser.add_argument("model_dir")
    shown = ",".join(map(str, batches))
    parser.add_argument(
        "--batches", type=numbers, default=batches, help=f"sequences, separated by commas (default: {shown})"
    )
    add_quantization(parser)
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--cublas", action="store_true", help="all products by cuBLAS")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values (default: auto)")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", default=hardware(), help="in the results (default: %(default)s)")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_flags(parser, BATCHES)
    shown = ",".join(map(str, CONTEXTS))
    parser.add_argument(
        "--contexts", type=numbers, default=CONTEXTS, help=f"tokens, separated by commas (default: {shown})"
    )
    parser.add_argument("--mixes", type=mixes, default=[], help="instead, contexts that differ, separated by commas")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all contexts begin with (default: 0)")
    parser.add_argument("--asks", choices=ASKS, default="nothing", help="what every row asks for beside a token")
    parser.add_argument("--sms", type=int, default=0, help="multiprocessors, in groups of 8 (default: 0, all)")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    args = parser.parse_args()
    if args.mixes:
        args.batches = sorted({len(mix.contexts) for mix in args.mixes})
    return args


def main() -> int:
    args = parse_args()
    require_gpu()
    bytes_per_s = read_ceiling()
    with confined(args.sms), own_memory("cuda") as memory:
        rows = measure(args, StepBench(args, memory, "cuda"), bytes_per_s)
    if args.results:
        append_rows(args.results, rows)
    return 0


def measure(args: argparse.Namespace, bench: StepBench, bytes_per_s: float) -> list[Row]:
    """Time and print every mix, and return the result rows."""
    bench.sampling = ASKS[args.asks]
    if args.shared:
        bench.prefix, bench.reads_once = SharedPrefix(0, args.shared // bench.block_size * bench.block_size), True
    table = Table("batch", "ms", "beside ms", "%", title=f"decode step, {bytes_per_s / 1e12:.2f} TB/s")
    rows = []
    grid = [uniform(num_rows, context) for context in args.contexts for num_rows in args.batches]
    for mix in args.mixes or grid:
        step_ms = measured_ms(bench, mix, args.profile)
        if step_ms is None:
            print(f"{mix.name} do not fit, skipped")
            continue
        if args.shared:
            beside = _beside_reading_again(bench, mix)
        else:
            beside = _beside(bench, mix, bytes_per_s) if mix in grid else _beside_evened(bench, mix)
        table.add_row(mix.name, f"{step_ms:.3f}", f"{beside[1]:.3f}", f"{100 * beside[1] / step_ms:.0f}")
        step = Figure("step", step_ms, "ms")
        rows.append(row_of(args.hardware, served_as(args), _workload(args, mix), step, beside=beside))
    Console().print(table)
    return rows


def _workload(args: argparse.Namespace, mix: ContextMix) -> str:
    where = f"on {args.sms} multiprocessors" if args.sms else "alone"
    shared = f", {args.shared} of them shared" if args.shared else ""
    stored = "" if args.kv_dtype == "auto" else f", KV in {args.kv_dtype}"
    return f"decode step {where}, {mix.name}{shared}{stored}" + ("" if args.asks == "nothing" else f", {args.asks}")


def measured_ms(bench: StepBench, mix: ContextMix, profile: bool) -> float | None:
    """Return the time of a step over the batch, or None if the batch does not fit."""
    if not bench.fill(mix.contexts):
        return None
    step_ms = bench.median_ms(len(mix.contexts))
    if profile:
        print(bench.profile(len(mix.contexts)))
    return step_ms


def _beside(bench: StepBench, mix: ContextMix, bytes_per_s: float) -> tuple[str, float]:
    return "read floor", bench.floor_ms(mix.contexts, bytes_per_s)


def _beside_reading_again(bench: StepBench, mix: ContextMix) -> tuple[str, float]:
    bench.reads_once = False
    step_ms = measured_ms(bench, mix, profile=False)
    bench.reads_once = True
    assert step_ms is not None, "it fitted before"
    return "read for each row", step_ms


def _beside_evened(bench: StepBench, mix: ContextMix) -> tuple[str, float]:
    step_ms = measured_ms(bench, mix.evened(), profile=False)
    assert step_ms is not None, "what fits unevenly fits evenly"
    return "as many keys evenly", step_ms


if __name__ == "__main__":
    sys.exit(main())
