"""Times every way of multiplying a few tokens by a model's weight matrices, and keeps the best as data.

    python -m benchmarks.tune_linear [--models qwen3-4b,qwen3-8b,llama3.1-8b]

Each candidate runs in a CUDA graph over more copies of the matrix than the cache holds, each launch
depending on the one before, as in a decode step. Results go to `common/ops/plans/<gpu>.json`;
shapes that were not measured this time keep what they had.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.make_checkpoint import PRESETS
from common.ops.base import Residual
from common.ops.linear import FusedLinear, settled
from common.ops.linear_plan import Fusion, Kind, Plan, plan_file

TOKENS = (1, 4, 16, 32, 64)  # each stands for the token counts up to it
CACHE_BYTES = 200 << 20
REPLAYS = 7
COMPILERS = 14
SHARED_BYTES = 220_000  # of a program's tiles; Hopper has 227 kB


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a model: `n` outputs from `k` inputs."""

    fusion: Fusion
    n: int
    k: int

    @property
    def rows(self) -> int:
        return self.n * (2 if self.fusion is Fusion.GATE else 1)


def shapes_of(preset: str) -> list[Shape]:
    config = PRESETS[preset]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return [
        Shape(Fusion.NORM, q + 2 * kv, hidden),
        Shape(Fusion.ADD, hidden, q),
        Shape(Fusion.GATE, inner, hidden),
        Shape(Fusion.ADD, hidden, inner),
        Shape(Fusion.LOGITS, config["vocab_size"], hidden),
    ]


def candidates(shape: Shape, tokens: int) -> Iterator[Plan]:
    yield Plan(Kind.CUBLAS)
    if tokens == 1:
        yield from _gemv_candidates(shape)
    else:
        yield from _skinny_candidates(shape, tokens)


def _gemv_candidates(shape: Shape) -> Iterator[Plan]:
    """Programs of one warp do best, of four where rows are long; a thread holds all that is loaded ahead."""
    sides = 2 if shape.fusion is Fusion.GATE else 1
    for rows, (warps, unroll), preload in product((1, 2, 4), ((1, 1), (1, 2), (2, 1), (4, 1)), (1, 2, 3, 5)):
        tiles = -(-shape.k // (256 * warps * unroll))
        registers = 4 * rows * unroll * sides * preload
        if preload <= tiles and 16 <= registers <= 80 and rows * unroll * sides <= 8:
            yield Plan(Kind.GEMV, rows=rows, warps=warps, unroll=unroll, preload=preload)


def _skinny_candidates(shape: Shape, tokens: int) -> Iterator[Plan]:
    sides = 2 if shape.fusion is Fusion.GATE else 1
    splits = (1, 2, 4) if shape.fusion is Fusion.ADD else (1,)
    tiles = ((32, 128, 4), (32, 256, 3), (64, 64, 6), (64, 128, 4), (64, 128, 6), (64, 256, 3), (128, 128, 4))
    for (block_n, block_k, stages), split in product(tiles, splits):
        programs = -(-shape.n // block_n) * split
        shared_bytes = (block_n * sides + max(tokens, 16)) * block_k * 2 * stages
        if programs < 60 or (split > 1 and programs > 400) or shared_bytes > SHARED_BYTES:
            continue
        if (block_n == 32 and tokens > 16) or (block_n == 128 and tokens < 32):
            continue
        yield Plan(
            Kind.SKINNY, block_n=block_n, block_k=block_k, splits=split, stages=stages, warps=8 if block_n == 128 else 4
        )


class Bench:
    """Operands of one shape at one token count, in as many copies as the cache needs to be cold."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape, self.device = shape, torch.device("cuda")
        copies = max(2, -(-CACHE_BYTES // (shape.rows * shape.k * 2)))
        self.weights = [
            torch.randn(shape.rows, shape.k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)
        ]
        self.x = torch.randn(tokens, shape.k, device="cuda", dtype=torch.bfloat16)
        self.norm = torch.randn(shape.k, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.zeros(tokens, shape.n, device="cuda", dtype=torch.bfloat16)
        self.linear = FusedLinear()

    def run(self, plan: Plan, weight: Tensor, *, pdl: bool) -> Tensor:
        x = Residual(self.x)
        match self.shape.fusion:
            case Fusion.ADD:
                return settled(self.linear.linear_add(plan, self.x, weight, Residual(self.residual), pdl), pdl)
            case Fusion.GATE:
                return self.linear.norm_gate_up(plan, x, self.norm, 1e-6, weight, pdl)
            case Fusion.NORM:
                return self.linear.norm_linear(plan, x, self.norm, 1e-6, weight, torch.bfloat16, pdl)
            case Fusion.LOGITS:
                return self.linear.norm_linear(plan, x, self.norm, 1e-6, weight, torch.float32, pdl)

    def is_right(self, plan: Plan) -> bool:
        """Whether the plan agrees with cuBLAS on fresh operands."""
        self.residual.zero_()
        expected = self.run(Plan(Kind.CUBLAS), self.weights[0], pdl=False).float().clone()
        self.residual.zero_()
        error = (self.run(plan, self.weights[0], pdl=True).float() - expected).norm() / expected.norm()
        return bool(error < 2e-2)

    def median_us(self, plan: Plan) -> float:
        for weight in self.weights:
            self.run(plan, weight, pdl=True)
        torch.cuda.synchronize()
        graph, launches = torch.cuda.CUDAGraph(), 3 * len(self.weights)
        with torch.cuda.graph(graph):
            for i in range(launches):
                self.run(plan, self.weights[i % len(self.weights)], pdl=True)
        times_ms = []
        for _ in range(REPLAYS + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end))
        return float(statistics.median(times_ms[2:])) * 1e3 / launches


def tune(shape: Shape, tokens: int) -> dict[str, object]:
    """The best plan of a shape as a row of the table."""
    bench = Bench(shape, tokens)
    timed = sorted(
        ((bench.median_us(plan), plan) for plan in candidates(shape, tokens) if bench.is_right(plan)),
        key=lambda pair: pair[0],
    )
    best_us, best = timed[0]
    cublas_us = next(us for us, plan in timed if plan.kind is Kind.CUBLAS)
    tb_per_s = shape.rows * shape.k * 2 / best_us / 1e6
    tiles = {key: value for key, value in asdict(best).items() if value and key != "kind"}
    print(
        f"{shape.fusion:6} {shape.n:6} x {shape.k:5} {tokens:3} tokens: {best_us:7.2f} us {tb_per_s:5.2f} TB/s"
        f"  cublas {cublas_us:7.2f} us  {best.kind} {tiles}",
        flush=True,
    )
    return {
        "fusion": shape.fusion, "n": shape.n, "k": shape.k, "max_tokens": tokens, "kind": best.kind, "tiles": tiles,
        "us": round(best_us, 2), "cublas_us": round(cublas_us, 2),
    }  # fmt: skip


def work(presets: list[str]) -> list[tuple[Shape, int]]:
    shapes = dict.fromkeys(shape for preset in presets for shape in shapes_of(preset))
    return [(shape, tokens) for shape in shapes for tokens in TOKENS]


def compile_part(presets: list[str], part: int) -> None:
    """Fill the disk cache with one part of the candidates, so that the timing process finds them."""
    jobs = [(shape, tokens, plan) for shape, tokens in work(presets) for plan in candidates(shape, tokens)]
    for shape, tokens, plan in jobs[part::COMPILERS]:
        small = Shape(shape.fusion, min(shape.n, 4096), shape.k)
        bench = Bench(small, tokens)
        bench.run(plan, bench.weights[0], pdl=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-4b", help="presets, separated by commas (default: %(default)s)")
    parser.add_argument("--out", default="", help="file to write (default: the plans of this GPU)")
    parser.add_argument("--compile-part", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    presets = args.models.split(",")
    if args.compile_part >= 0:
        compile_part(presets, args.compile_part)
        return 0
    command = [sys.executable, "-m", "benchmarks.tune_linear", "--models", args.models, "--compile-part"]
    compilers = [subprocess.Popen([*command, str(part)]) for part in range(COMPILERS)]
    for compiler in compilers:
        compiler.wait()
    gpu_name = torch.cuda.get_device_name()
    path = plan_file(gpu_name)
    known = json.loads(path.read_text(encoding="utf-8"))["plans"] if path.exists() else []
    measured = [tune(shape, tokens) for shape, tokens in work(presets)]
    keys = {(row["fusion"], row["n"], row["k"]) for row in measured}
    kept = [row for row in known if (row["fusion"], row["n"], row["k"]) not in keys]
    table = {"gpu": gpu_name, "torch": torch.__version__, "plans": [*kept, *measured]}
    lines = ",\n".join(json.dumps(row) for row in table.pop("plans"))
    text = json.dumps(table)[:-1] + ', "plans": [\n' + lines + "\n]}\n"
    path.parent.mkdir(exist_ok=True)
    (path if not args.out else type(path)(args.out)).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
