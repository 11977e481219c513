"""A step of decode attention in one kernel, as tests of it and of what comes before it make one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from common.kernels.attention.decode_division import divide, limits_for
from common.kernels.attention.decode_parts import PartsWorkspace, make_workspace
from common.kernels.attention.hopper.fused_decode_attention import fused_decode_attention
from common.kernels.base.attention_operands import AttentionWeights, SharedDivision, SharedParts
from common.ops import reference
from common.ops.base import ForwardBatch
from tests.kernels.conftest import MakePaged
from tests.support.attention_weights import attention_weights

MakeStep = Callable[[list[int], "Shape"], "Step"]
RunLayer = Callable[["Step", Tensor, int], Tensor]
"""A step over a pool, in a layer."""

LAYER = 1  # of the two of `make_paged`, the one that is not NaN


@dataclass(frozen=True)
class Shape:
    num_q: int
    num_kv: int
    head_dim: int
    block_size: int
    num_slots: int  # programs that contexts are divided for: the more, the more are cut
    has_norm: bool = True
    has_bias: bool = False
    programs_per_sm: int = 3
    window: int = 0
    has_sinks: bool = False
    has_factors: bool = False
    norms_values: bool = False
    shares_kv: bool = False


@dataclass(frozen=True)
class Step:
    """One new token of each sequence; all that must not be read is NaN, the new slots too."""

    qkv: Tensor  # [num_seqs, weights.num_heads * head_dim], NaN for padding
    weights: AttentionWeights
    pool: Tensor  # [num_blocks, 2, 2, block_size, num_kv, head_dim]
    batch: ForwardBatch
    shape: Shape

    @property
    def slots(self) -> Tensor:
        """Of the new tokens: `[num_seqs]` int64, -1 for padding."""
        [slots] = self.batch.slots
        return slots

    def written(self) -> Tensor:
        """Where in the pool the new keys and values belong: bool, of its shape."""
        slots = self.slots[self.slots >= 0]
        written = torch.zeros_like(self.pool, dtype=torch.bool)
        block_size = self.pool.shape[3]
        written[slots // block_size, LAYER, :, slots % block_size] = True
        return written

    def workspace(self) -> PartsWorkspace:
        shape = self.shape
        limits = limits_for(self.qkv.shape[0], shape.num_kv, shape.num_slots)
        return make_workspace(limits.max_joins, shape.num_q, shape.num_kv, shape.head_dim, self.qkv.device)

    def run(
        self,
        pool: Tensor,
        workspace: PartsWorkspace,
        layer_id: int = LAYER,
        *,
        shared: SharedDivision | None = None,
        before: SharedParts | None = None,
        pdl: bool = False,
    ) -> Tensor:
        shape, seq_lens = self.shape, self.batch.seq_lens
        return fused_decode_attention(
            qkv=self.qkv,
            weights=self.weights,
            kv_cache=pool,
            layer_id=layer_id,
            block_tables=self.batch.block_tables[0],
            seq_lens=seq_lens,
            division=divide(seq_lens, shape.num_kv, shape.num_slots, pool.shape[1], window=shape.window, shared=shared),
            workspace=workspace,
            programs_per_sm=shape.programs_per_sm,
            shared=shared,
            before=before,
            pdl=pdl,
        )

    def expected(self, pool: Tensor) -> Tensor:
        """The output by the reference, which writes to `pool`."""
        batch, weights = self.batch, self.weights
        k, v = pool[:, LAYER].unbind(1)
        q = reference.qk_norm_rope_kv(self.qkv, weights, batch.positions, self.slots, k, v)
        seen = (weights.scale, weights.window, weights.sinks)
        return reference.paged_attention(q, k, v, batch.block_tables[0], batch, *seen).flatten(1)


def step_of(make_paged: MakePaged, seq_lens: list[int], shape: Shape) -> Step:
    """A step over such contexts."""
    num_q, num_kv, head_dim = shape.num_q, shape.num_kv, shape.head_dim
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, shape.block_size, num_kv, head_dim, shape.window)
    batch = replace(batch, positions=(batch.seq_lens - 1).clamp(min=0))  # the reference looks up every position
    weights = attention_weights(
        num_q,
        num_kv,
        head_dim,
        max(seq_lens) + 1,
        pool.device,
        pool.dtype,
        has_norm=shape.has_norm,
        has_bias=shape.has_bias,
        has_factors=shape.has_factors,
        has_sinks=shape.has_sinks,
        norms_values=shape.norms_values,
        shares_kv=shape.shares_kv,
        window=shape.window,
    )
    qkv = torch.randn(len(seq_lens), weights.num_heads * head_dim).to(pool)
    qkv[batch.seq_lens == 0] = float("nan")
    step = Step(qkv, weights, pool, batch, shape)
    pool[step.written()] = float("nan")
    return step


def check_overlapping_layers(step: Step, run_layer: RunLayer, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """In a graph, where each layer begins before the last has ended, they have the bits that each has by itself.

    Returns the output that is that of the step alone.
    """
    pool = step.pool[:, LAYER:].repeat(1, 4, 1, 1, 1, 1)  # four layers alike
    steps = [replace(step, qkv=step.qkv * scale) for scale in (1.0, 0.5, 1.5, 2.0)]
    alone = []
    for layer, each in enumerate(steps):
        alone.append(run_layer(each, pool, layer))
        torch.cuda.synchronize()
    monkeypatch.undo()  # kernels that poison would stand between the layers
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained = [run_layer(each, pool, layer) for layer, each in enumerate(steps)]
    for _ in range(5):
        for out in chained:
            out.fill_(float("nan"))
        graph.replay()
        for ours, theirs in zip(chained, alone, strict=True):
            assert torch.equal(ours, theirs)
    return alone[0]
