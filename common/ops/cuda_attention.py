"""Attention on a GPU over the cache of a group of layers; prompts and decode steps have kernels of their own."""

from torch import Tensor

from common.kernels.attention.decode_attention import decode_attention
from common.kernels.attention.decode_division import divide, programs_per_sm
from common.kernels.attention.few_query_attention import few_query_attention
from common.kernels.attention.hopper.fused_decode_attention import MAX_SHARING_DIM, fused_decode_attention, is_supported
from common.kernels.attention.hopper.long_attention import long_attention
from common.kernels.attention.hopper.shared_prefix_attention import shared_prefix_attention
from common.kernels.attention.prefill_attention import prefill_attention
from common.kernels.attention.shared_division import bundle_queries, share, tokens_of_bundle
from common.kernels.attention.shared_parts import MAX_SHARED_DIM, shared_slots
from common.kernels.base.attention_operands import AttentionWeights, PromptOperands, SharedDivision, SharedPrefixes
from common.kernels.base.e4m3 import as_operand
from common.kernels.base.gpu import gpu_of
from common.kernels.elementwise.qk_norm_rope_kv import qk_norm_rope_kv
from common.kernels.elementwise.row_slots import row_slots
from common.ops import reference
from common.ops.base import DecodeWork, ForwardBatch, GroupCache
from common.ops.prompt_attention import has_few_queries, is_gathered
from common.ops.workspaces import Workspaces
from common.settings.config import KernelsSection


class CudaAttention:
    """Attention of the layers of a group; each kernel can be exchanged for its reference.

    Args:
        max_num_seqs: most sequences of a batch with a token each.
        pdl: launch kernels before their predecessors have finished; pays in a captured graph.
    """

    def __init__(self, cache: GroupCache, kernels: KernelsSection, max_num_seqs: int, *, pdl: bool) -> None:
        self.cache, self.num_q_heads, self.window = cache
        self._operand = as_operand(self.cache, gpu_of(self.cache.device))  # the cache as kernels take it
        self.kernels = kernels
        self.pdl = pdl
        self._gpu = gpu_of(self.cache.device)
        self._workspaces = Workspaces(cache, max_num_seqs)

    @property
    def is_fused(self) -> bool:
        """Tell whether decode attention, with norm, RoPE and the write of K and V, is a single kernel."""
        chosen = self.kernels.rope == self.kernels.decode_attention == "triton"
        return chosen and self._gpu.is_hopper and is_supported(self.num_q_heads, self._operand)

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether a step reads blocks shared by rows once; beginnings out of sight of a window are not read."""
        return self.is_fused and not self.window and self.cache.shape[5] <= MAX_SHARED_DIM

    def row_slots(self, batch: ForwardBatch, block_table: Tensor) -> Tensor:
        """Return slots of the rows of a decode batch: `[num_rows]` int64."""
        return row_slots(batch.positions, batch.seq_lens, block_table, self.cache.shape[3], pdl=self.pdl)

    def divide(self, batch: ForwardBatch) -> DecodeWork:
        """Divide the attention of a decode step among programs."""
        shared = None
        if batch.prefixes is not None and self.shares_prefixes:
            shared = self._share(batch.prefixes, batch.seq_lens)
        num_layers, num_kv = self.cache.shape[1], self.cache.shape[4]
        num_slots = self._programs_per_sm(batch) * self._gpu.num_sms
        sizes = (batch.seq_lens, num_kv, num_slots, num_layers)
        return DecodeWork(divide(*sizes, window=self.window, shared=shared, pdl=self.pdl), shared)

    def attend(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `Ops.attention`."""
        assert weights.window == self.window, f"window of {weights.window}: the group's is {self.window}"
        if batch.one_token_each and self.is_fused:
            return self._fused_attention(qkv, weights, layer_id, batch)
        q = self._rotate_and_write(qkv, weights, layer_id, batch)
        if batch.one_token_each:
            return self._decode_attention(q, weights, layer_id, batch).flatten(1)
        return self._prompt_attention(q, weights, layer_id, batch).flatten(1)

    def attend_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `Ops.attention_of_last`."""
        q = self._rotate_and_write(qkv, weights, layer_id, batch)[batch.last_tokens]
        return self._prompt_attention(q, weights, layer_id, batch.one_query_each()).flatten(1)

    def _rotate_and_write(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        assert batch.slots, "attention that is not one kernel needs slots"
        slots = batch.slots[weights.group]
        if self.kernels.rope == "torch":
            return reference.qk_norm_rope_kv(qkv, weights, batch.positions, slots, *self.cache[:, layer_id].unbind(1))
        k_cache, v_cache = self._operand[:, layer_id].unbind(1)
        return qk_norm_rope_kv(qkv, weights, batch.positions, slots, k_cache, v_cache, pdl=self.pdl)

    def _prompt_attention(self, q: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        if self.kernels.prefill_attention == "torch":
            return self._law(q, weights, layer_id, batch)
        k_cache, v_cache = self._operand[:, layer_id].unbind(1)
        k_scale, v_scale = weights.cache_scales(k_cache.dtype)
        prompts = PromptOperands(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables[weights.group],
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            scale=weights.scale * k_scale,
            window=self.window,
            sinks=weights.sinks,
            v_scale=v_scale,
        )
        if has_few_queries(q, k_cache.shape[2]):
            return few_query_attention(prompts, self._workspaces.query_parts(), self._gpu)
        if self._gpu.is_hopper and is_gathered(q, batch.seq_lens.shape[0], batch.num_keys):
            return long_attention(prompts, batch.num_keys)
        return prefill_attention(prompts, batch.max_query_len, self._gpu)

    def _fused_attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        tables, seq_lens, before = batch.block_tables[weights.group], batch.seq_lens, None
        division, shared = _work(batch, weights)
        if shared is not None:
            before = self._workspaces.shared_parts()
            k_cache, v_cache = self._operand[:, layer_id].unbind(1)
            shared_prefix_attention(qkv, weights, k_cache, v_cache, tables, seq_lens, shared, before, pdl=self.pdl)
        return fused_decode_attention(
            qkv=qkv,
            weights=weights,
            kv_cache=self._operand,
            layer_id=layer_id,
            block_tables=tables,
            seq_lens=seq_lens,
            division=division,
            workspace=self._workspaces.parts(),
            programs_per_sm=self._programs_per_sm(batch),
            shared=shared,
            before=before,
            pdl=self.pdl,
        )

    def _decode_attention(self, q: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        if self.kernels.decode_attention == "torch":
            return self._law(q, weights, layer_id, batch)
        k_cache, v_cache = self._operand[:, layer_id].unbind(1)
        k_scale, v_scale = weights.cache_scales(k_cache.dtype)
        return decode_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=batch.block_tables[weights.group],
            seq_lens=batch.seq_lens,
            scale=weights.scale * k_scale,
            division=_work(batch, weights).division,
            workspace=self._workspaces.parts(),
            layer_id=layer_id,
            window=self.window,
            sinks=weights.sinks,
            v_scale=v_scale,
            pdl=self.pdl,
        )

    def _law(self, q: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = self.cache[:, layer_id].unbind(1)
        return reference.cache_attention(q, weights, k_cache, v_cache, batch.block_tables[weights.group], batch)

    def _share(self, prefixes: SharedPrefixes, seq_lens: Tensor) -> SharedDivision:
        num_rows, num_kv = seq_lens.shape[0], self.cache.shape[4]
        queries = bundle_queries(num_rows, self.num_q_heads, num_kv)
        tokens, num_slots = tokens_of_bundle(queries, self.num_q_heads, num_kv), shared_slots(queries, self._gpu)
        return share(prefixes, seq_lens, tokens, num_kv, num_slots, pdl=self.pdl)

    def _programs_per_sm(self, batch: ForwardBatch) -> int:
        if self.is_fused and self.cache.shape[5] > MAX_SHARING_DIM:
            return 1
        return programs_per_sm(batch.seq_lens.shape[0], self.cache.shape[4], self._gpu.num_sms)


def _work(batch: ForwardBatch, weights: AttentionWeights) -> DecodeWork:
    work = batch.work[weights.group]
    assert isinstance(work, DecodeWork), "a decode step begins with `begin`"
    return work
