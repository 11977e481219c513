"""Speed of each kernel at a model's shapes, beside this GPU's read bandwidth of today.

    python -m benchmarks.kernels [--only decode] [--results FILE]

Shapes are Qwen3-4B's where a case names no model. Every case is first checked against the reference. Times are medians
over replays of a CUDA graph. The launches of a graph rotate over more memory than the L2 cache holds, because a step
finds a cold cache. `decode ...` are whole operations of a decode step, as planned and fused for this GPU. The number is
the number of tokens; for attention, sequences x tokens of each. `... attention 8 x 16 of 1040` is a prompt step of 8
sequences of 1,040 tokens. All but the last 16 tokens of each sequence are in the KV pool already. `window 128` means
layers whose tokens see the last 128 tokens. `route ...` and `experts ...` are layers of experts of the model named.
`latent ...` is attention of DeepSeek-V2-Lite.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cases.attention import attention_cases
from benchmarks.cases.decode import decode_cases
from benchmarks.cases.delta import delta_cases
from benchmarks.cases.expert import expert_cases
from benchmarks.cases.kernel import Case, kernel_cases
from benchmarks.cases.latent import latent_cases
from benchmarks.cases.prompt import prompt_cases
from benchmarks.own_memory import require_gpu
from deploy.bench.origin import hardware
from deploy.bench.results import append_rows, row_of
from deploy.bench.stats import Figure

READ_BYTES = 2 << 30
REPLAYS = 15
GRAPH_MS = 8.0  # target for the work of a replay


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid: (num_words / BLOCK,). A program reads BLOCK int32 and writes a single int32."""
    program = tl.program_id(0)
    x = tl.load(x_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + program, tl.sum(x, axis=0))


def read_ceiling() -> float:
    """Return the bytes a second of a kernel that only reads."""
    words = torch.randint(0, 9, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    sums = torch.empty(words.numel() // 8192, dtype=torch.int32, device="cuda")

    def run(_: int) -> Tensor:
        _read_kernel[(sums.numel(),)](x_ptr=words, out_ptr=sums, BLOCK=8192, num_warps=8)
        return sums

    return READ_BYTES / median_us(run, 1) * 1e6


def median_us(run: Callable[[int], Tensor], num_variants: int) -> float:
    """Return the microseconds of a launch among many in a graph."""
    for i in range(num_variants):
        run(i)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run(0)
    end.record()
    end.synchronize()
    launches = max(num_variants, min(200, int(GRAPH_MS / begin.elapsed_time(end))), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % num_variants)
    times_ms = []
    for i in range(REPLAYS + 3):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times_ms.append(begin.elapsed_time(end))
    return float(statistics.median(times_ms)) * 1e3 / launches


def is_right(out: Tensor, expected: Tensor) -> bool:
    """Compare a result: floats to rounding, token ids except draws at the edge of rounding, bytes exactly."""
    if out.dtype == torch.uint8:
        return torch.equal(out, expected)
    if not out.is_floating_point():
        return bool((out == expected).float().mean() >= 0.95)
    return bool((out.float() - expected.float()).norm() <= 1e-2 * expected.float().norm())


def main() -> int:
    args = parse_args()
    require_gpu()
    torch.manual_seed(0)
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"read ceiling {ceiling / 1e12:.2f} TB/s\n")
    print(f"{'case':34}{'us':>10}{'MB':>10}{'TB/s':>8}{'% read':>8}{'TFLOP/s':>9}")
    rows, num_wrong = [], 0
    cases = (
        decode_cases(),
        kernel_cases(),
        prompt_cases(),
        attention_cases(),
        delta_cases(),
        expert_cases(),
        latent_cases(),
    )
    for case in chain(*cases):
        if args.only not in case.name:
            continue
        if not is_right(case.run(0), case.expected()):
            num_wrong += 1
            print(f"{case.name:34}{'WRONG':>10}", flush=True)
            continue
        us = median_us(case.run, case.num_variants)
        print(line_of(case, us, ceiling), flush=True)
        workload, floor = f"kernel {case.name}, {case.num_bytes / 1e6:.2f} MB", case.num_bytes / ceiling * 1e6
        time_us = Figure("time", us, "us")
        rows.append(row_of(args.hardware, case.model, workload, time_us, beside=("read floor", floor)))
    if args.results:
        append_rows(args.results, rows)
    return 1 if num_wrong else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument("--hardware", default=hardware(), help="in the results (default: %(default)s)")
    return parser.parse_args()


def line_of(case: Case, us: float, ceiling: float) -> str:
    rate = case.num_bytes / us * 1e6  # bytes a second
    flops = f"{case.num_flops / us / 1e6:9.0f}" if case.num_flops else ""
    return f"{case.name:34}{us:10.2f}{case.num_bytes / 1e6:10.2f}{rate / 1e12:8.2f}{100 * rate / ceiling:8.0f}{flops}"


if __name__ == "__main__":
    sys.exit(main())
