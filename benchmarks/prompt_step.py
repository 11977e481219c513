"""Time of a prompt in a worker, by length and share of the GPU, without a server.

    python -m benchmarks.prompt_step MODEL_DIR [--lengths 1024,8192] [--shares 100,80]
        [--together 32x256+4096] [--profile]

Uses the prefill worker's own engine, chunks, graphs and share (`prefill.sm_share`). Each time runs from the launch of
the first chunk to the first token on the host. `--together` adds steps of several prompts with a cached prefix in
common. `--profile` lists the kernels of a prompt by time.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.model_flags import add_quantization, served_as
from benchmarks.own_memory import own_memory, require_gpu, separate, usual
from common.device.engine.engine import Engine, build_engine
from common.device.engine.gpu_share import make_share
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.device.steps.warm_up import warm_up_prompts
from common.memory.client.client import MemoryClient
from common.models.reading import AS_STORED, KEEP
from common.settings.config import Config, ModelSection, PrefillSection, WorkerSection
from common.settings.memory_sections import KVSection
from common.wire.values.sampling_params import SamplingParams
from deploy.bench.origin import hardware
from deploy.bench.results import Row, append_rows, row_of
from deploy.bench.stats import Figure
from deploy.bench.workload import numbers

LENGTHS = [128, 512, 1024, 2048, 8192, 16_000]
SHARES = [100]
REPEATS = 7
WARM_UPS = 2
NUM_SEQS = 8


class Together(NamedTuple):
    """A step of several prompts: new tokens of each, after a cached prefix shared by all."""

    num_prompts: int
    num_tokens: int
    num_before: int

    @staticmethod
    def parse(text: str) -> list["Together"]:
        """Parse `32x256+4096`, or several with commas; raises ValueError for anything else."""
        return [Together(*map(int, re.split("[x+]", each))) for each in text.split(",")]

    def __str__(self) -> str:
        return f"{self.num_prompts} of {self.num_tokens} tokens behind {self.num_before} shared"


class PromptBench:
    """A prefill worker's engine, and a runner for each share of the GPU; a step has at most `num_seqs` prompts.

    `pool_bytes` is as `kv.pool_bytes`; 0 is what workers have room for.
    """

    def __init__(
        self,
        model_dir: str,
        chunk_tokens: int,
        memory: MemoryClient,
        device: str,
        num_seqs: int = NUM_SEQS,
        quantization: str = AS_STORED,
        head: str = KEEP,
        pool_bytes: int = 0,
    ) -> None:
        config = Config(
            model=ModelSection(path=model_dir, quantization=quantization, head=head),
            worker=WorkerSection(device=device),
            prefill=PrefillSection(max_batch_tokens=chunk_tokens),
            kv=KVSection(pool_bytes=pool_bytes),
        )
        self.chunk_tokens, self.num_seqs = chunk_tokens, num_seqs
        self.engine: Engine = build_engine(config, memory, step_tokens=chunk_tokens, logit_rows=num_seqs)

    def runner(self, percent: int) -> PromptRunner:
        """Return a warm runner, like a worker's with `prefill.sm_share` = percent."""
        share = make_share(percent, self.engine.device)
        runner = PromptRunner(self.engine, self.chunk_tokens, self.num_seqs, share)
        if self.engine.device.type == "cuda":
            warm_up_prompts(runner)
            runner.capture()
        return runner

    def fits(self, num_tokens: int) -> bool:
        """Tell whether the model takes a prompt of `num_tokens`."""
        return num_tokens <= self.engine.max_len

    def chunks(self, num_tokens: int) -> list[PromptChunk]:
        """Return a prompt in the chunks of a worker, with blocks of its own."""
        shape, budget = self.engine.pool.shape, self.chunk_tokens
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(self.engine.model.config.vocab_size, (num_tokens,), generator=generator).tolist()
        tables = [  # a block that no token sees any more comes again
            [block_ids[place % len(block_ids)] for place in range(group.num_places(num_tokens))]
            for group, block_ids in zip(shape.layout.groups, separate(shape, usual(shape)), strict=True)
        ]
        greedy = SamplingParams(temperature=0.0)
        return [
            PromptChunk(ids[begin : begin + budget], begin, tables, greedy, is_last=begin + budget >= num_tokens)
            for begin in range(0, num_tokens, budget)
        ]

    def together(self, step: Together) -> list[PromptChunk]:
        """Return the prompts of a step; raises ValueError if the step or the pool is too small."""
        [group], shape = self.engine.pool.layout.groups, self.engine.pool.shape
        num_shared = group.num_places(step.num_before)
        num_own = group.num_places(step.num_before + step.num_tokens) - num_shared
        num_blocks = num_shared + step.num_prompts * num_own
        if step.num_prompts * step.num_tokens > self.chunk_tokens or num_blocks >= sum(shape.num_blocks):
            raise ValueError(f"{step}: more than {self.chunk_tokens} tokens of a step, or than the pool has room for")
        shared = list(range(1, 1 + num_shared))
        owns = (range(begin, begin + num_own) for begin in range(1 + num_shared, 1 + num_blocks, num_own))
        greedy = SamplingParams(temperature=0.0)
        return [
            PromptChunk([7] * step.num_tokens, step.num_before, [[*shared, *own]], greedy, is_last=True) for own in owns
        ]

    def median_ms(self, runner: PromptRunner, num_tokens: int, *, whole_gpu: bool) -> float:
        chunks = self.chunks(num_tokens)
        return median_ms(lambda: run(runner, chunks, whole_gpu=whole_gpu))

    def together_ms(self, runner: PromptRunner, step: Together, *, whole_gpu: bool) -> float:
        chunks = self.together(step)
        return median_ms(lambda: runner.run(chunks, whole_gpu=whole_gpu))

    def profile(self, runner: PromptRunner, num_tokens: int, *, whole_gpu: bool) -> str:
        """Return a table of a prompt's kernels by time."""
        chunks = self.chunks(num_tokens)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run(runner, chunks, whole_gpu=whole_gpu)
        return str(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))


def median_ms(act: Callable[[], object]) -> float:
    """Return the median duration of an act, after warm-ups."""
    times_s = []
    for _ in range(WARM_UPS + REPEATS):
        begin_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[WARM_UPS:]) * 1e3


def run(runner: PromptRunner, chunks: list[PromptChunk], *, whole_gpu: bool) -> None:
    """Launch two steps ahead, as a worker does, and wait for the last."""
    pending = [runner.launch([chunk], whole_gpu=whole_gpu) for chunk in chunks[:2]]
    for i in range(len(chunks)):
        pending[i].tokens()
        pending += [runner.launch([chunk], whole_gpu=whole_gpu) for chunk in chunks[i + 2 : i + 3]]


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompt_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir")
    add_quantization(parser)
    for flag, default, what in (("--lengths", LENGTHS, "tokens"), ("--shares", SHARES, "percent of the GPU")):
        shown = ",".join(map(str, default))
        parser.add_argument(flag, type=numbers, default=default, help=f"{what}, separated by commas (default: {shown})")
    parser.add_argument(
        "--together",
        type=Together.parse,
        default=[],
        metavar="COUNTxTOKENS+BEFORE",
        help="prompts of one step, by number, tokens and those before them, that are there, separated by commas",
    )
    parser.add_argument("--chunk", type=int, default=8192, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a prompt")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", default=hardware(), help="in the results (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    require_gpu(args.device)
    with own_memory(args.device) as memory:
        num_seqs = max([NUM_SEQS, *(step.num_prompts for step in args.together)])
        bench = PromptBench(args.model_dir, args.chunk, memory, args.device, num_seqs, args.quantization, args.head)
        rows = measure(args, bench)
    if args.results:
        append_rows(args.results, rows)
    return 0


def measure(args: argparse.Namespace, bench: PromptBench) -> list[Row]:
    """Time and print every length and step, and return the result rows."""
    table, rows = Table("share, %", "tokens", "ms", "tokens/s", title="one prompt in its worker"), []
    for percent in args.shares:
        runner, whole_gpu = bench.runner(percent), percent == 100
        for num_tokens in args.lengths:
            if not bench.fits(num_tokens):
                print(f"{num_tokens} tokens do not fit, skipped")
                continue
            prompt_ms = bench.median_ms(runner, num_tokens, whole_gpu=whole_gpu)
            table.add_row(str(percent), str(num_tokens), f"{prompt_ms:.2f}", f"{num_tokens / prompt_ms * 1e3:,.0f}")
            rows.append(_row(args, percent, num_tokens, prompt_ms))
            if args.profile:
                print(bench.profile(runner, num_tokens, whole_gpu=whole_gpu))
        for step in args.together:
            num_tokens = step.num_prompts * step.num_tokens
            step_ms = bench.together_ms(runner, step, whole_gpu=whole_gpu)
            table.add_row(str(percent), str(step), f"{step_ms:.2f}", f"{num_tokens / step_ms * 1e3:,.0f}")
            workload = f"prompts in one step, {step}, {percent} % of the GPU"
            rows.append(row_of(args.hardware, served_as(args), workload, Figure("step", step_ms, "ms")))
    Console().print(table)
    return rows


def _row(args: argparse.Namespace, percent: int, num_tokens: int, prompt_ms: float) -> Row:
    workload = f"prompt alone, {num_tokens} tokens, {percent} % of the GPU"
    return row_of(args.hardware, served_as(args), workload, Figure("prompt", prompt_ms, "ms"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
