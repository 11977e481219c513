"""Times every plan for multiplying a few tokens by a model's weight matrices, and keeps the best as data.

    python -m benchmarks.tune_linear [--models qwen3-4b,qwen3-8b] [--tokens 1,4,8,16,32,64]

A kernel's speed depends on its neighbours, because with dependent launches a kernel begins while the last ends. So a
product is timed in a captured decode step of a few layers, with attention over a context. A plan is chosen with the
other products' plans in place. A second round begins with the first round's choices. `--scheme` tunes quantized
products. Results go to `common/ops/plans/<gpu>.json`; shapes not measured in a run keep their plans.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.linear_candidates import Operands, Shape, candidates, shapes_of
from benchmarks.own_memory import require_gpu
from benchmarks.presets import PRESETS
from common.base.dtypes import DTYPES
from common.kernels.base.gpu import Gpu, gpu_of
from common.models.config import DecoderConfig
from common.models.decoder import Decoder
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.quantized import is_quantized
from common.ops.base import ForwardBatch, GroupCache, Scheme
from common.ops.cuda_ops import CudaOps
from common.ops.linear_plan import Fusion, Kind, Plan, plan_file, rule_of_thumb
from common.settings.config import KernelsSection

TOKENS = (1, 4, 8, 16, 32, 64)  # each stands for the token counts up to it
LAYERS, CONTEXT, BLOCK_SIZE = 6, 1024, 16  # six layers are more than the cache holds
REPLAYS, ROUNDS = 15, 2
COMPILERS = 14

Row = dict[str, object]


class ChosenPlans:
    """A stand-in for `LinearPlans` in `CudaOps`, with plans that change during the choice."""

    def __init__(self, shapes: list[Shape], tokens: int) -> None:
        gpu = _gpu()
        self.plans = {
            shape: rule_of_thumb(shape.fusion, tokens, shape.n, shape.k, gpu, shape.scheme) for shape in shapes
        }

    def plan(self, fusion: Fusion, num_tokens: int, n: int, k: int, scheme: Scheme = Scheme.PLAIN) -> Plan:
        return self.plans[Shape(fusion, n, k, scheme)]


class Step:
    """A decode step of a few layers of a model's shapes."""

    def __init__(self, preset: str, tokens: int, scheme: Scheme) -> None:
        config, device = few_layers(preset, scheme), torch.device("cuda")
        self.model = Decoder(config, made_weights(config, device), CONTEXT)
        caches = made_caches(config, tokens, device)
        self.ops = CudaOps(caches, KernelsSection(), tokens, pdl=_gpu().has_dependent_launch)
        self.chosen = self.ops.plans = ChosenPlans(shapes_of(preset, scheme), tokens)
        self.batch = decode_batch(config, tokens, device)

    def median_us(self) -> float:
        """Return the time of a layer, with its share of the logits."""
        with torch.inference_mode():
            self.model.forward(self.batch, self.ops)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.model.forward(self.batch, self.ops)
        times_ms = []
        for _ in range(REPLAYS + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end))
        return float(statistics.median(times_ms[3:])) * 1e3 / LAYERS

    def choose(self, shape: Shape, plans: list[Plan]) -> Row:
        """Keep the fastest plan for a product; return the plan with a layer's time, and the time with cuBLAS."""
        times_us = {}
        for plan in plans:
            self.chosen.plans[shape] = plan
            times_us[plan] = self.median_us()
        best = self.chosen.plans[shape] = min(times_us, key=lambda plan: times_us[plan])
        tiles = {key: value for key, value in asdict(best).items() if value and key != "kind"}
        return {
            "kind": best.kind, "tiles": tiles, "layer_us": round(times_us[best], 2),
            "cublas_layer_us": round(times_us[Plan(Kind.CUBLAS)], 2),
        }  # fmt: skip


def tune(preset: str, tokens: int, scheme: Scheme) -> list[Row]:
    """Return the best plans of a model's products in a scheme, as rows of the table."""
    right = {}
    for shape in (shape for shape in shapes_of(preset, scheme) if shape.scheme is scheme):
        operands = Operands(shape, tokens)
        right[shape] = [plan for plan in candidates(shape, tokens, _gpu()) if operands.is_right(plan)]
    step, rows = Step(preset, tokens, scheme), {}
    for _ in range(ROUNDS):
        for shape, plans in right.items():
            rows[shape] = step.choose(shape, plans)
    for shape, row in rows.items():
        print(f"{preset} {scheme} {shape.fusion:6} {shape.n:6} x {shape.k:5} {tokens:3} tokens: {row}", flush=True)
    return [_key(shape) | {"max_tokens": tokens} | row for shape, row in rows.items()]


def _key(shape: Shape) -> Row:
    """Return the columns that name a product; plain ones have no scheme."""
    key: Row = {"fusion": shape.fusion, "n": shape.n, "k": shape.k}
    return key if shape.scheme is Scheme.PLAIN else key | {"scheme": shape.scheme}


def _gpu() -> Gpu:
    return gpu_of(torch.device("cuda"))


def few_layers(preset: str, scheme: Scheme = Scheme.PLAIN) -> DecoderConfig:
    """Return the config of the first LAYERS layers of a known model."""
    published = PRESETS[preset]
    kinds = published.get("layer_types")
    cut = {"num_hidden_layers": LAYERS, "layer_types": kinds and kinds[:LAYERS]}
    config = decoder_config(Settings(published | cut, preset))
    return config if scheme is Scheme.PLAIN else replace(config, scheme=scheme)


def made_weights(config: DecoderConfig, device: torch.device) -> dict[str, Tensor]:
    """Return random weights, those in MXFP4 with scales of 1/512 to 1/8, those in 8 bits with scales as of 0.02."""
    tensors = {}
    for name, stack in config.stacks().items():
        if stack.dtype == "uint8":
            low, high = (118, 125) if name.endswith("_scales") else (0, 256)
            tensors[name] = torch.randint(low, high, stack.shape, dtype=torch.uint8, device=device)
        elif is_quantized(stack):
            rows = torch.randint(-100, 101, stack.shape, dtype=torch.int8, device=device)
            tensors[name] = rows if stack.dtype == "int8" else rows.to(torch.float8_e4m3fn)
        elif stack.is_beside:
            tensors[name] = torch.full(stack.shape, 3e-4, device=device)
        else:
            made = torch.randn(stack.shape, dtype=DTYPES[stack.dtype or "bfloat16"], device=device)
            tensors[name] = made.mul_(0.02) if made.ndim == 2 else made
    return tensors


def made_caches(config: DecoderConfig, tokens: int, device: torch.device) -> list[GroupCache]:
    """Return random caches of each group, for `tokens` sequences of CONTEXT tokens."""
    caches = []
    for group, num_q_heads in zip(config.cache_groups(BLOCK_SIZE, "bfloat16"), config.q_heads, strict=True):
        shape = (tokens * group.num_places(CONTEXT), *group.block_shape)
        blocks = torch.randn(shape, dtype=DTYPES[group.dtype], device=device)
        caches.append(GroupCache(blocks, num_q_heads, group.window))
    return caches


def decode_batch(config: DecoderConfig, tokens: int, device: torch.device) -> ForwardBatch:
    """Return a batch of the last token of each of `tokens` sequences of CONTEXT tokens, in scattered blocks."""
    last = torch.full((tokens,), CONTEXT - 1, dtype=torch.int32, device=device)
    places = [group.num_places(CONTEXT) for group in config.cache_groups(BLOCK_SIZE, "bfloat16")]
    return ForwardBatch(
        token_ids=torch.arange(tokens, dtype=torch.int32, device=device),
        positions=last,
        slots=(),
        block_tables=tuple(torch.randperm(tokens * num, device=device).int().view(tokens, num) for num in places),
        seq_lens=last + 1,
        cu_seqlens=torch.arange(tokens + 1, dtype=torch.int32, device=device),
        last_tokens=None,
        max_query_len=1,
        max_seq_len=CONTEXT,
    )


def compile_part(presets: list[str], tokens_of: list[int], scheme: Scheme, part: int) -> None:
    """Fill the disk cache with a part of the candidates, so that the timing process compiles nothing."""
    gpu = _gpu()
    shapes = dict.fromkeys(shape for preset in presets for shape in shapes_of(preset, scheme))
    work = [(shape, tokens) for shape in shapes for tokens in tokens_of]
    jobs = [(shape, tokens, plan) for shape, tokens in work for plan in candidates(shape, tokens, gpu)]
    for shape, tokens, plan in jobs[part::COMPILERS]:
        Operands(replace(shape, n=min(shape.n, 4096)), tokens).is_right(plan)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_linear",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default="qwen3-4b", help="presets, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--tokens", default=",".join(map(str, TOKENS)), help="token counts that plans are for (default: %(default)s)"
    )
    parser.add_argument(
        "--scheme", type=Scheme, choices=list(Scheme), default=Scheme.PLAIN, help="(default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="file to write (default: the plans of this GPU)")
    parser.add_argument("--compile-part", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    presets, tokens_of = args.models.split(","), [int(tokens) for tokens in args.tokens.split(",")]
    if args.compile_part >= 0:
        compile_part(presets, tokens_of, args.scheme, args.compile_part)
        return 0
    require_gpu()
    command = [sys.executable, "-m", "benchmarks.tune_linear", "--models", args.models, "--tokens", args.tokens]
    command += ["--scheme", args.scheme]
    compilers = [subprocess.Popen([*command, "--compile-part", str(part)]) for part in range(COMPILERS)]
    for compiler in compilers:
        compiler.wait()
    measured: list[Row] = []
    for preset, tokens in product(presets, tokens_of):
        measured += tune(preset, tokens, args.scheme)
        write(args.out or plan_file(torch.cuda.get_device_name()), measured)  # a run takes minutes and may be cut short
    return 0


def write(path: Path, measured: list[Row]) -> None:
    """Replace the rows of the measured shapes; for a shape of two models, the first model's row stays."""
    known = json.loads(path.read_text(encoding="utf-8"))["plans"] if path.exists() else []
    keys = {_place(row) for row in measured}
    kept = [row for row in known if _place(row) not in keys]
    under = {"torch": torch.__version__}  # and the Triton that belongs to it
    first = {_place(row): row | under for row in reversed(measured)}
    lines = ",\n".join(json.dumps(row) for row in [*kept, *reversed(first.values())])
    head = json.dumps({"gpu": torch.cuda.get_device_name()})[:-1]
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{head}, "plans": [\n{lines}\n]}}\n', encoding="utf-8")


def _place(row: Row) -> tuple[object, ...]:
    """Return what a plan is looked up by."""
    return row["fusion"], row["n"], row["k"], row.get("scheme", Scheme.PLAIN), row["max_tokens"]


if __name__ == "__main__":
    sys.exit(main())
