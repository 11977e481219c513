"""The operations of a decode step of Qwen3-4B, as a worker runs them.

Operations go through `CudaOps`. Kernel and tiles follow the plan for this GPU, launched with programmatic dependence.
Fused operations are timed fused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap

import torch
from torch import Tensor

from benchmarks.cases.kernel import (
    BLOCK_SIZE,
    EPS,
    HEAD_DIM,
    HIDDEN,
    INNER,
    NUM_KV,
    NUM_Q,
    QKV,
    TOKEN_BYTES,
    VOCAB,
    Case,
    attention_weights,
    paged_batch,
    random,
    variants_for,
)
from common.kernels.base.gpu import gpu_of
from common.kernels.products.join_parts import join_parts
from common.ops.base import ForwardBatch, GroupCache, Norm, Ops, Residual, Weight
from common.ops.cuda_ops import CudaOps
from common.ops.linear_plan import Fusion, LinearPlans
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection

TOKENS = (1, 4, 16, 64)
CONTEXTS = ((1, 1024), (8, 1024), (64, 1024), (1, 8192), (64, 4096))  # sequences, tokens of each


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight matrix: `n` outputs from `k` inputs."""

    name: str
    fusion: Fusion
    n: int
    k: int

    @property
    def rows(self) -> int:
        """Rows of the matrix; gate and up are stacked."""
        return 2 * self.n if self.fusion is Fusion.GATE else self.n

    def num_bytes(self, num_tokens: int) -> int:
        """Return bytes moved: matrix and inputs read, outputs written; a residual is counted as 4 bytes."""
        out_bytes = {Fusion.LOGITS: 4, Fusion.ADD: 4}.get(self.fusion, 2)
        return self.rows * self.k * 2 + num_tokens * (self.k * 2 + self.n * out_bytes)


PRODUCTS = (
    Product("qkv", Fusion.NORM, QKV, HIDDEN),
    Product("o", Fusion.ADD, HIDDEN, NUM_Q * HEAD_DIM),
    Product("gate_up", Fusion.GATE, INNER, HIDDEN),
    Product("down", Fusion.ADD, HIDDEN, INNER),
    Product("lm_head", Fusion.LOGITS, VOCAB, HIDDEN),
)


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of a product; matrices rotate between launches, the rest stays."""

    x: Tensor  # [num_tokens, k]
    norm: Norm  # [k]
    weights: list[Weight]  # each [rows, k]
    residual: Tensor  # [num_tokens, n], zero before the first launch

    def apply(self, ops: Ops, fusion: Fusion, weight: Weight) -> Tensor:
        match fusion:
            case Fusion.NORM:
                return ops.norm_linear(Residual(self.x), self.norm, weight)
            case Fusion.ADD:
                return _whole(ops.linear_add(self.x, weight, Residual(self.residual)))
            case Fusion.GATE:
                return ops.norm_gate_up(Residual(self.x), self.norm, weight)
            case Fusion.LOGITS:
                return ops.logits(Residual(self.x), self.norm, weight)

    def in_fp32(self) -> "Operands":
        """Return float32 copies for the reference, with a single matrix and a zero residual."""
        weights, residual = [Weight(self.weights[0].data.float())], torch.zeros_like(self.residual, dtype=torch.float32)
        norm = replace(self.norm, weight=self.norm.weight.float())
        return replace(self, x=self.x.float(), norm=norm, weights=weights, residual=residual)


def _whole(x: Residual) -> Tensor:
    """Return the rows with split-K parts added; in a step, the next norm adds the parts."""
    return x.rows if x.parts is None else join_parts(x.parts, x.rows, pdl=gpu_of(x.rows.device).has_dependent_launch)


def product_case(num_tokens: int, which: Product) -> Case:
    num_bytes = which.num_bytes(num_tokens)
    pool, _ = decode_batch(num_tokens, BLOCK_SIZE, 1)
    operands = Operands(
        x=random(num_tokens, which.k),
        norm=Norm(random(which.k), EPS),
        weights=[Weight(random(which.rows, which.k) * 0.02) for _ in range(variants_for(num_bytes))],
        residual=torch.zeros(num_tokens, which.n, dtype=torch.bfloat16, device="cuda"),
    )
    ops = decode_ops(pool, num_tokens)

    def run(i: int) -> Tensor:
        return operands.apply(ops, which.fusion, operands.weights[i])

    def expected() -> Tensor:
        exact = operands.in_fp32()
        return exact.apply(TorchOps([GroupCache(pool, NUM_Q)]), which.fusion, exact.weights[0])

    plans = LinearPlans(gpu_of(pool.device))
    kind = plans.plan(which.fusion, num_tokens, which.n, which.k).kind
    return Case(f"decode {which.name} {num_tokens} ({kind})", run, expected, len(operands.weights), num_bytes)


def attention_case(num_seqs: int, seq_len: int) -> Case:
    """Make a case of query/key norm, RoPE, the write of K and V, and attention: all work between two products.

    `num_bytes` is the traffic of a single fused kernel: old keys and values read, new ones written, QKV read, the
    output written. Split attention moves a little more.
    """
    num_bytes = num_seqs * (seq_len * TOKEN_BYTES + (QKV + NUM_Q * HEAD_DIM) * 2)
    num_layers = variants_for(num_bytes)
    pool, batch = decode_batch(num_seqs, seq_len, num_layers)
    ops, weights, qkv = decode_ops(pool, num_seqs), attention_weights(seq_len), random(num_seqs, QKV)

    batch = ops.begin(batch)

    def run(i: int) -> Tensor:
        return ops.attention(qkv, weights, i, batch)

    def expected() -> Tensor:
        return TorchOps([GroupCache(pool, NUM_Q)]).attention(qkv, weights, 0, batch)

    how = "fused" if ops.shares_prefixes else "split"
    return Case(f"decode attention {num_seqs} x {seq_len} ({how})", run, expected, num_layers, num_bytes)


def decode_batch(
    num_seqs: int, seq_len: int, num_layers: int, num_kv: int = NUM_KV, head_dim: int = HEAD_DIM
) -> tuple[Tensor, ForwardBatch]:
    """Make a pool, and a batch of the last token of each of its sequences."""
    pool, batch = paged_batch(1, seq_len, num_seqs, num_layers, num_kv, head_dim)
    positions = batch.seq_lens - 1
    slots = batch.block_tables[0][:, -1].long() * BLOCK_SIZE + positions.long() % BLOCK_SIZE
    return pool, replace(batch, positions=positions, slots=(slots,), last_tokens=None)


def decode_ops(pool: Tensor, num_seqs: int) -> CudaOps:
    return CudaOps([GroupCache(pool, NUM_Q)], KernelsSection(), num_seqs, pdl=gpu_of(pool.device).has_dependent_launch)


def decode_cases() -> Iterator[Case]:
    """Yield cases lazily, because the buffers of all cases would not fit at once."""
    yield from starmap(product_case, product(TOKENS, PRODUCTS))
    yield from starmap(attention_case, CONTEXTS)
