"""Operations in plain torch: the CPU backend, and the standard for the GPU's operations."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.attention_operands import AttentionWeights
from common.ops import reference
from common.ops.base import (
    Activation,
    DeltaWeights,
    ExpertWeights,
    ForwardBatch,
    GroupCache,
    LatentWeights,
    Norm,
    Residual,
    Router,
    Routing,
    StateWork,
    Weight,
)
from common.ops.delta_rule import begin_states, delta_rule


class TorchOps:
    """`Ops` by the reference functions, on any device; linears in the model's dtype.

    Args:
        caches: of each group of KV blocks.
    """

    def __init__(self, caches: Sequence[GroupCache]) -> None:
        self.caches = [cache.blocks for cache in caches]
        self._has_states = [cache.has_states for cache in caches]

    @property
    def shares_prefixes(self) -> bool:
        return False

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        groups = list(zip(self.caches, batch.block_tables, self._has_states, strict=True))
        work = [StateWork(begin_states(cache, table, batch)) if states else None for cache, table, states in groups]
        batch = replace(batch, work=tuple(work))
        if batch.slots:
            return batch
        slots = [
            batch.positions if states else reference.row_slots(batch.positions, batch.seq_lens, table, cache.shape[3])
            for cache, table, states in groups
        ]
        return replace(batch, slots=tuple(slots))

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0) -> Residual:
        rows = functional.embedding(token_ids, table.data)
        return Residual(rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype))

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        return reference.linear(reference.rms_norm(x.rows, norm.weight, norm.eps), weight)

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        assert batch.slots, "a step begins with `begin`"
        k_cache, v_cache = self.caches[weights.group][:, layer_id].unbind(1)
        slots, table = batch.slots[weights.group], batch.block_tables[weights.group]
        q = reference.qk_norm_rope_kv(qkv, weights, batch.positions, slots, k_cache, v_cache)
        return reference.cache_attention(q, weights, k_cache, v_cache, table, batch).flatten(1)

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        return self.attention(qkv, weights, layer_id, batch)[batch.last_tokens]

    def latent_attention(
        self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        assert batch.slots, "a step begins with `begin`"
        cache, table = self.caches[weights.group][:, layer_id, 0, :, 0], batch.block_tables[weights.group]
        reference.write_latents(kv, weights, batch.positions, batch.slots[weights.group], cache)
        q = reference.rotated_queries(q, weights, batch.positions)
        absorbed = batch.one_token_each
        return reference.latent_attention(q, cache, table, batch, weights, is_absorbed=absorbed).flatten(1)

    def latent_attention_of_last(
        self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        return self.latent_attention(q, kv, weights, layer_id, batch)[batch.last_tokens]

    def delta_rule(self, x: Tensor, weights: DeltaWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        states, work = self.caches[weights.group][:, layer_id, 0, 0], batch.work[weights.group]
        assert isinstance(work, StateWork), "a step begins with `begin`"
        return delta_rule(x, weights, states, batch.block_tables[weights.group], batch, work.is_new)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.float().sigmoid().to(x.dtype)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        return Residual(residual.rows + reference.linear(x, weight))

    def linear_norm_add(
        self, x: Tensor, weight: Weight, norm: Norm, residual: Residual, scale: Tensor | None = None
    ) -> Residual:
        return self.norm_add(reference.linear(x, weight), norm, residual, scale)

    def norm_add(self, x: Tensor, norm: Norm, residual: Residual, scale: Tensor | None = None) -> Residual:
        return Residual(reference.norm_add(x, norm.weight, norm.eps, residual.rows, scale))

    def norm_gate_up(
        self, x: Residual, norm: Norm, gate_up: Weight, activation: Activation = Activation.SILU
    ) -> Tensor:
        return reference.gate_mul(self.norm_linear(x, norm, gate_up), activation)

    def norm(self, x: Residual, norm: Norm) -> Tensor:
        return reference.rms_norm(x.rows, norm.weight, norm.eps)

    def norm_route(self, x: Residual, norm: Norm, router: Router, present: Tensor) -> tuple[Tensor, Routing]:
        normed = self.norm(x, norm)
        return normed, reference.route(normed, router, present)

    def experts_add(self, x: Tensor, routing: Routing, weights: ExpertWeights, residual: Residual) -> Residual:
        return Residual((residual.rows + reference.experts(x, routing, weights)).to(residual.rows.dtype))

    def experts_norm_add(
        self, x: Tensor, routing: Routing, weights: ExpertWeights, norm: Norm, residual: Residual
    ) -> Residual:
        return self.norm_add(reference.experts(x, routing, weights).to(x.dtype), norm, residual)

    def logits(self, x: Residual, norm: Norm, weight: Weight, cap: float = 0.0) -> Tensor:
        logits = self.norm_linear(x, norm, weight).float()
        return cap * torch.tanh(logits / cap) if cap else logits
