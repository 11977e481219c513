"""The operations on a GPU: Triton kernels around cuBLAS."""

import torch
from torch import Tensor
from torch.nn import functional

from common.config import KernelsSection
from common.kernels.decode_attention import DecodeWorkspace, decode_attention, make_workspace
from common.kernels.prefill_attention import prefill_attention
from common.kernels.qk_norm_rope_kv import qk_norm_rope_kv
from common.kernels.rms_norm import rms_norm
from common.kernels.silu_mul import silu_mul
from common.ops import reference
from common.ops.base import AttentionWeights, ForwardBatch


class CudaOps:
    """`Ops` on a GPU; each kernel can be exchanged for its reference.

    Args:
        kv_cache: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, the pool.
        kernels: which implementation each operation has.
        max_num_seqs: most sequences of a batch with one token each.
    """

    def __init__(self, kv_cache: Tensor, kernels: KernelsSection, max_num_seqs: int) -> None:
        self.kv_cache = kv_cache
        self.kernels = kernels
        self.max_num_seqs = max_num_seqs
        self._rms_norm = rms_norm if kernels.norm == "triton" else reference.rms_norm
        self._qk_norm_rope_kv = qk_norm_rope_kv if kernels.rope == "triton" else reference.qk_norm_rope_kv
        self._silu_mul = silu_mul if kernels.activation == "triton" else reference.silu_mul
        self._workspace: DecodeWorkspace | None = None

    @property
    def graph_safe(self) -> bool:
        """Whether a decode step may be captured: the references wait for the device."""
        kernels = self.kernels
        step = (kernels.norm, kernels.rope, kernels.activation, kernels.decode_attention)
        return all(choice == "triton" for choice in step)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding(token_ids, table)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        return functional.linear(self._rms_norm(x, norm, eps), weight)

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = self.kv_cache[:, layer_id].unbind(1)
        q = self._qk_norm_rope_kv(qkv, weights, batch.positions, batch.slot_mapping, k_cache, v_cache)
        one_token_each = batch.max_query_len == 1 and q.shape[0] == batch.seq_lens.shape[0]
        attend = self._decode_attention if one_token_each else self._prefill_attention
        return attend(q, k_cache, v_cache, batch).flatten(1)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return torch.addmm(residual, x, weight.t(), out=residual)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        return self._silu_mul(self.norm_linear(x, norm, eps, gate_up))

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, batch: ForwardBatch) -> Tensor:
        y = self._rms_norm(x[batch.logit_rows], norm, eps)
        return torch.mm(y, weight.t(), out_dtype=torch.float32)

    def _prefill_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch) -> Tensor:
        scale = q.shape[2] ** -0.5
        if self.kernels.prefill_attention == "torch":
            return reference.paged_attention(q, k_cache, v_cache, batch, scale)
        return prefill_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables,
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=scale,
        )

    def _decode_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch) -> Tensor:
        scale = q.shape[2] ** -0.5
        if self.kernels.decode_attention == "torch":
            return reference.paged_attention(q, k_cache, v_cache, batch, scale)
        return decode_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            scale=scale,
            workspace=self._decode_workspace(q.shape[1]),
        )

    def _decode_workspace(self, num_q_heads: int) -> DecodeWorkspace:
        """Made by the first decode step, which runs before any graph is captured."""
        if self._workspace is None:
            device = self.kv_cache.device
            self._workspace = make_workspace(
                max_num_seqs=self.max_num_seqs,
                num_q_heads=num_q_heads,
                num_kv_heads=self.kv_cache.shape[4],
                head_dim=self.kv_cache.shape[5],
                num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
                device=device,
            )
        return self._workspace
