"""Operations in plain torch: the CPU backend, and the standard for the GPU's operations."""

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from common.kernels.base.operands import AttentionWeights
from common.ops import reference
from common.ops.base import ForwardBatch, Norm, Residual, Weight


class TorchOps:
    """`Ops` by the reference functions, on any device; linears in the model's dtype.

    Args:
        kv_cache: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, the pool.
    """

    def __init__(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache

    @property
    def shares_prefixes(self) -> bool:
        return False

    def begin(self, batch: ForwardBatch, num_q_heads: int) -> ForwardBatch:
        if batch.slot_mapping is not None:
            return batch
        slots = reference.row_slots(batch.positions, batch.seq_lens, batch.block_tables[0], self.kv_cache.shape[3])
        return replace(batch, slot_mapping=slots)

    def embed(self, token_ids: Tensor, table: Weight) -> Residual:
        return Residual(functional.embedding(token_ids, table.data))

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        return functional.linear(reference.rms_norm(x.rows, norm.weight, norm.eps), weight.data)

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        assert batch.slot_mapping is not None, "a step begins with `begin`"
        k_cache, v_cache = self.kv_cache[:, layer_id].unbind(1)
        q = reference.qk_norm_rope_kv(qkv, weights, batch.positions, batch.slot_mapping, k_cache, v_cache)
        return reference.paged_attention(q, k_cache, v_cache, batch, weights.head_dim**-0.5).flatten(1)

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        return self.attention(qkv, weights, layer_id, batch)[batch.last_tokens]

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        return Residual(residual.rows + functional.linear(x, weight.data))

    def norm_gate_up(self, x: Residual, norm: Norm, gate_up: Weight) -> Tensor:
        return reference.silu_mul(self.norm_linear(x, norm, gate_up))

    def logits(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        return self.norm_linear(x, norm, weight).float()
