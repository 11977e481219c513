"""Operations on a GPU: Triton kernels around products chosen by a plan."""

from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.attention.decode_attention import decode_attention
from common.kernels.attention.decode_division import MOST_PROGRAMS_PER_SM, divide, limits_for, programs_per_sm
from common.kernels.attention.decode_parts import PartsWorkspace, make_workspace
from common.kernels.attention.few_query_attention import few_query_attention
from common.kernels.attention.fused_decode_attention import fused_decode_attention, is_supported
from common.kernels.attention.long_attention import long_attention
from common.kernels.attention.prefill_attention import prefill_attention
from common.kernels.attention.query_parts import QueryParts, make_query_parts
from common.kernels.attention.shared_division import bundle_queries, share, tokens_of_bundle
from common.kernels.attention.shared_parts import make_shared_parts, most_shared_slots, shared_slots
from common.kernels.attention.shared_prefix_attention import shared_prefix_attention
from common.kernels.base.gpu import gpu_of
from common.kernels.base.operands import AttentionWeights, Division, SharedDivision, SharedParts, SharedPrefixes
from common.kernels.elementwise.embedding import embedding
from common.kernels.elementwise.qk_norm_rope_kv import qk_norm_rope_kv
from common.kernels.elementwise.row_slots import row_slots
from common.kernels.elementwise.silu_mul import silu_mul
from common.ops import reference
from common.ops.base import ForwardBatch, Norm, Residual, Weight
from common.ops.linear import FusedLinear
from common.ops.linear_plan import Fusion, Kind, LinearPlans, Plan, Plans
from common.ops.prompt_attention import has_few_queries, is_gathered
from common.settings.config import KernelsSection


class CudaOps:
    """`Ops` on a GPU; each kernel can be exchanged for its reference.

    Args:
        kv_cache: `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, the pool.
        kernels: the implementation of each operation.
        max_num_seqs: most sequences of a batch with a token each.
        pdl: launch kernels before their predecessors have finished; pays in a captured graph.
    """

    def __init__(self, kv_cache: Tensor, kernels: KernelsSection, max_num_seqs: int, *, pdl: bool = False) -> None:
        self.kv_cache = kv_cache
        self.kernels = kernels
        self.max_num_seqs = max_num_seqs
        self.pdl = pdl
        self._gpu = gpu_of(kv_cache.device)
        # Planned kernels fuse norm and activation, and exist for two bytes an element only.
        planned = (kernels.linear, kernels.norm, kernels.activation) == ("triton",) * 3
        self._is_planned = planned and kv_cache.element_size() == 2
        self.plans: Plans = LinearPlans(self._gpu)
        self._linear = FusedLinear(
            norm=None if kernels.norm == "triton" else reference.rms_norm,
            activation=silu_mul if kernels.activation == "triton" else reference.silu_mul,
            pdl=pdl,
        )
        self._making = Lock()  # threads that compile kernels ask for workspaces at the same time
        self._workspace: PartsWorkspace | None = None
        self._query_parts: QueryParts | None = None
        self._shared_parts: SharedParts | None = None

    @property
    def graph_safe(self) -> bool:
        """Tell whether a decode step may be captured; references cannot be, because they wait for the device."""
        kernels = self.kernels
        step = (kernels.norm, kernels.rope, kernels.activation, kernels.decode_attention)
        return all(choice == "triton" for choice in step)

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether blocks shared by rows are read once, so that `ForwardBatch.prefixes` has an effect."""
        return self.fuses_attention(num_q_heads=self.kv_cache.shape[4])  # or more heads; `attention` knows the number

    def fuses_attention(self, num_q_heads: int) -> bool:
        """Tell whether decode attention, with norm, RoPE and the write of K and V, is a single kernel."""
        chosen = self.kernels.rope == self.kernels.decode_attention == "triton"
        return chosen and self._gpu.is_hopper and is_supported(num_q_heads, self.kv_cache)

    def begin(self, batch: ForwardBatch, num_q_heads: int) -> ForwardBatch:
        if not batch.one_token_each:
            return batch
        if batch.slot_mapping is None and not self.fuses_attention(num_q_heads):
            block_size = self.kv_cache.shape[3]
            slots = row_slots(batch.positions, batch.seq_lens, batch.block_tables[0], block_size, pdl=self.pdl)
            batch = replace(batch, slot_mapping=slots)
        if self.kernels.decode_attention == "torch":
            return batch
        if batch.prefixes is not None and self.fuses_attention(num_q_heads):
            batch = replace(batch, shared=self._share(batch.prefixes, batch.seq_lens, num_q_heads))
        return replace(batch, division=self._divide(batch))

    def embed(self, token_ids: Tensor, table: Weight) -> Residual:
        if self.pdl:
            return Residual(embedding(token_ids, table.data, pdl=True))
        return Residual(functional.embedding(token_ids, table.data))

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        plan = self._plan(Fusion.NORM, weight.num_out, x.rows)
        return self._linear.norm_linear(plan, x, norm, weight, x.rows.dtype)

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        if batch.one_token_each and self.fuses_attention(weights.num_q_heads):
            return self._fused_attention(qkv, weights, layer_id, batch)
        k_cache, v_cache = self.kv_cache[:, layer_id].unbind(1)
        q = self._rotate_and_write(qkv, weights, batch, k_cache, v_cache)
        if batch.one_token_each:
            return self._decode_attention(q, k_cache, v_cache, layer_id, batch).flatten(1)
        return self._prefill_attention(q, k_cache, v_cache, batch).flatten(1)

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = self.kv_cache[:, layer_id].unbind(1)
        q = self._rotate_and_write(qkv, weights, batch, k_cache, v_cache)[batch.last_tokens]
        return self._prefill_attention(q, k_cache, v_cache, batch.one_query_each()).flatten(1)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        plan = self._plan(Fusion.ADD, weight.num_out, x)
        return self._linear.linear_add(plan, x, weight, residual)

    def norm_gate_up(self, x: Residual, norm: Norm, gate_up: Weight) -> Tensor:
        plan = self._plan(Fusion.GATE, gate_up.num_out // 2, x.rows)
        return self._linear.norm_gate_up(plan, x, norm, gate_up)

    def logits(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        plan = self._plan(Fusion.LOGITS, weight.num_out, x.rows)
        return self._linear.norm_linear(plan, x, norm, weight, torch.float32)

    def _plan(self, fusion: Fusion, n: int, x: Tensor) -> Plan:
        return self.plans.plan(fusion, x.shape[0], n, x.shape[1]) if self._is_planned else Plan(Kind.CUBLAS)

    def _rotate_and_write(
        self, qkv: Tensor, weights: AttentionWeights, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        assert batch.slot_mapping is not None, "attention that is not one kernel needs slots"
        if self.kernels.rope == "torch":
            return reference.qk_norm_rope_kv(qkv, weights, batch.positions, batch.slot_mapping, k_cache, v_cache)
        return qk_norm_rope_kv(qkv, weights, batch.positions, batch.slot_mapping, k_cache, v_cache, pdl=self.pdl)

    def _prefill_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch) -> Tensor:
        scale = q.shape[2] ** -0.5
        if self.kernels.prefill_attention == "torch":
            return reference.paged_attention(q, k_cache, v_cache, batch, scale)
        if has_few_queries(q, k_cache.shape[2]):
            return self._few_query_attention(q, k_cache, v_cache, batch)
        if self._gpu.is_hopper and is_gathered(q, batch.seq_lens.shape[0], batch.num_keys):
            return long_attention(
                q, k_cache, v_cache, batch.block_tables[0], batch.cu_seqlens, batch.seq_lens, batch.num_keys, scale
            )
        return prefill_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables[0],
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=scale,
            gpu=self._gpu,
        )

    def _few_query_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch) -> Tensor:
        return few_query_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables[0],
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            scale=q.shape[2] ** -0.5,
            workspace=self._query_workspace(),
            gpu=self._gpu,
        )

    def _query_workspace(self) -> QueryParts:
        """Return the workspace; made by the first prompt step, which runs before any graph is captured."""
        with self._making:
            if self._query_parts is None:
                num_kv, head_dim = self.kv_cache.shape[4:]
                self._query_parts = make_query_parts(num_kv, head_dim, self._gpu, self.kv_cache.device)
            return self._query_parts

    def _fused_attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        assert batch.division is not None, "a step begins with `begin`"
        tables, seq_lens, before = batch.block_tables[0], batch.seq_lens, None
        if batch.shared is not None:
            before = self._shared_workspace()
            k_cache, v_cache = self.kv_cache[:, layer_id].unbind(1)
            shared_prefix_attention(
                qkv, weights, k_cache, v_cache, tables, seq_lens, batch.shared, before, pdl=self.pdl
            )
        return fused_decode_attention(
            qkv=qkv,
            weights=weights,
            kv_cache=self.kv_cache,
            layer_id=layer_id,
            block_tables=tables,
            seq_lens=seq_lens,
            division=batch.division,
            workspace=self._parts_workspace(weights.num_q_heads),
            programs_per_sm=self._programs_per_sm(batch),
            shared=batch.shared,
            before=before,
            pdl=self.pdl,
        )

    def _decode_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        scale = q.shape[2] ** -0.5
        if self.kernels.decode_attention == "torch":
            return reference.paged_attention(q, k_cache, v_cache, batch, scale)
        assert batch.division is not None, "a step begins with `begin`"
        return decode_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables[0],
            seq_lens=batch.seq_lens,
            scale=scale,
            division=batch.division,
            workspace=self._parts_workspace(q.shape[1]),
            layer_id=layer_id,
            pdl=self.pdl,
        )

    def _divide(self, batch: ForwardBatch) -> Division:
        _, num_layers, _, _, num_kv, _ = self.kv_cache.shape
        num_slots = self._programs_per_sm(batch) * self._gpu.num_sms
        return divide(batch.seq_lens, num_kv, num_slots, num_layers, shared=batch.shared, pdl=self.pdl)

    def _share(self, prefixes: SharedPrefixes, seq_lens: Tensor, num_q_heads: int) -> SharedDivision:
        num_rows, num_kv = seq_lens.shape[0], self.kv_cache.shape[4]
        queries = bundle_queries(num_rows, num_q_heads, num_kv)
        tokens, num_slots = tokens_of_bundle(queries, num_q_heads, num_kv), shared_slots(queries, self._gpu)
        return share(prefixes, seq_lens, tokens, num_kv, num_slots, pdl=self.pdl)

    def _programs_per_sm(self, batch: ForwardBatch) -> int:
        return programs_per_sm(batch.seq_lens.shape[0], self.kv_cache.shape[4], self._gpu.num_sms)

    def _parts_workspace(self, num_q_heads: int) -> PartsWorkspace:
        """Return the workspace; made by the first decode step, which runs before any graph is captured."""
        with self._making:
            if self._workspace is None:
                num_kv, head_dim = self.kv_cache.shape[4:]
                limits = limits_for(self.max_num_seqs, num_kv, MOST_PROGRAMS_PER_SM * self._gpu.num_sms)
                device = self.kv_cache.device
                self._workspace = make_workspace(limits.max_joins, num_q_heads, num_kv, head_dim, device)
            return self._workspace

    def _shared_workspace(self) -> SharedParts:
        """Return the workspace; made by the first step with shared prefixes, before the capture of its graph."""
        with self._making:
            if self._shared_parts is None:
                num_kv, head_dim = self.kv_cache.shape[4:]
                num_slots, device = most_shared_slots(self._gpu), self.kv_cache.device
                self._shared_parts = make_shared_parts(self.max_num_seqs, num_slots, num_kv, head_dim, device)
            return self._shared_parts
