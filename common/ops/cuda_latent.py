"""Latent attention on a GPU over the cache of a group: absorbed for decode steps and few tokens, else expanded.

Absorbed attention reads latents alone. Expanded attention first computes keys and values of all heads, and then takes
fewer products for each pair of a query and a key (`latent.prompt_attention`).
"""

from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.attention.decode_division import divide, limits_for
from common.kernels.attention.decode_parts import PartsWorkspace, make_workspace
from common.kernels.base.attention_operands import Division
from common.kernels.base.gpu import Gpu, gpu_of
from common.kernels.elementwise.row_slots import row_slots
from common.kernels.latent.decode_attention import (
    PROGRAMS_PER_SM,
    latent_decode_attention,
    latent_parts_bytes,
    num_groups,
)
from common.kernels.latent.gather_latents import gather_latents
from common.kernels.latent.inputs import absorb_new_queries, absorb_queries, rotate_latent_queries
from common.kernels.latent.prompt_attention import latent_prompt_attention
from common.kernels.latent.query_attention import latent_query_attention
from common.kernels.latent.values import latent_values
from common.ops import reference
from common.ops.base import DecodeWork, ForwardBatch, GroupCache, LatentWeights, RowsWork
from common.settings.config import KernelsSection

FEW_TOKENS = 128
"""Tokens of a step, at most, whose contexts are divided among programs; more tokens fill the GPU without that.

More tokens repay the expansion of keys and values, too, where the host knows how many keys there are.
"""
ROWS_AT_ONCE = 64
"""Tokens of few that attend in a launch."""
MAX_KEYS = 131_072
"""Keys of a step, at most, because gathering takes memory; more are attended as latents."""
EXPANDED_BYTES = 256 << 20
"""Keys and values expanded at once, at most; of as many heads as fit."""


def room_bytes(num_heads: int, rank: int, entry_dim: int, max_num_seqs: int, gpu: Gpu) -> int:
    """Return an upper bound of the bytes of workspaces, gathered latents, and keys and values expanded at once."""
    return (
        latent_parts_bytes(max(max_num_seqs, ROWS_AT_ONCE), num_heads, rank, gpu)
        + EXPANDED_BYTES
        + MAX_KEYS * entry_dim * 4
    )


class CudaLatent:
    """Latent attention of the layers of a group; kernels can be exchanged for their reference.

    Args:
        max_num_seqs: most sequences of a batch with a token each.
        pdl: launch kernels before their predecessors have finished; pays in a captured graph.
    """

    is_fused = False
    shares_prefixes = False

    def __init__(self, cache: GroupCache, kernels: KernelsSection, max_num_seqs: int, *, pdl: bool) -> None:
        self.cache, self.num_heads, _ = cache
        self.kernels = kernels
        self.pdl = pdl
        self._gpu = gpu_of(self.cache.device)
        self._max_rows = max(max_num_seqs, ROWS_AT_ONCE)
        self._num_slots = PROGRAMS_PER_SM * self._gpu.num_sms
        self._making = Lock()
        self._parts: PartsWorkspace | None = None

    def row_slots(self, batch: ForwardBatch, block_table: Tensor) -> Tensor:
        """Return slots of the rows of a decode batch: `[num_rows]` int64."""
        return row_slots(batch.positions, batch.seq_lens, block_table, self.cache.shape[3], pdl=self.pdl)

    def divide(self, batch: ForwardBatch, group: int) -> DecodeWork | RowsWork | None:
        """Divide the contexts of a decode step, or of few tokens of a prompt step, among programs."""
        num_tokens, num_layers = batch.token_ids.shape[0], self.cache.shape[1]
        if batch.one_token_each:
            divides = self.kernels.decode_attention != "torch"
            return DecodeWork(self._divide(batch.seq_lens, num_layers), None) if divides else None
        if num_tokens > FEW_TOKENS or self.kernels.prefill_attention == "torch":
            return None
        return self._rows_of(batch, group, num_layers)

    def attend(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `Ops.latent_attention`."""
        if batch.one_token_each and self.kernels.decode_attention != "torch":
            return self._decode(q, kv, weights, layer_id, batch)
        if self._is_expanded(q.shape[0], batch):
            return self._expanded(self._rotated(q, kv, weights, layer_id, batch), weights, layer_id, batch)
        if batch.one_token_each or self.kernels.prefill_attention == "torch":
            return self._by_law(self._rotated(q, kv, weights, layer_id, batch), weights, layer_id, batch)
        absorbed = self._absorbed(q, kv, weights, layer_id, batch)
        if q.shape[0] > FEW_TOKENS:
            return self._attend_queries(absorbed, weights, layer_id, batch)
        work = batch.work[weights.group]
        assert isinstance(work, RowsWork), "a step begins with `begin`"
        return self._attend_rows(absorbed, weights, layer_id, work, layer_id)

    def attend_last(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `Ops.latent_attention_of_last`."""
        q = self._rotated(q, kv, weights, layer_id, batch)[batch.last_tokens]
        if self.kernels.prefill_attention == "torch":
            return self._by_law(q, weights, layer_id, batch.one_query_each())
        work = self._rows(batch.block_tables[weights.group], batch.seq_lens, 1)
        return self._attend_rows(absorb_queries(q.flatten(1), weights), weights, layer_id, work, 0)

    def _is_expanded(self, num_tokens: int, batch: ForwardBatch) -> bool:
        if self.kernels.prefill_attention == "torch" or batch.one_token_each:
            return False
        return num_tokens > FEW_TOKENS and 0 < batch.num_keys <= MAX_KEYS

    def _layer(self, layer_id: int) -> Tensor:
        return self.cache[:, layer_id, 0, :, 0]

    def _rotated(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Write latents; return rotated queries `[num_tokens, num_heads, query_dim]`, in the memory of `q` or not."""
        operands = (q, kv, weights, batch.positions, batch.slots[weights.group], self._layer(layer_id))
        if self.kernels.rope == "torch":
            reference.write_latents(*operands[1:])
            return reference.rotated_queries(q, weights, batch.positions)
        return rotate_latent_queries(*operands)

    def _absorbed(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Write latents; return absorbed queries."""
        if self.kernels.rope == "torch":
            return absorb_queries(self._rotated(q, kv, weights, layer_id, batch).flatten(1), weights)
        slots, cache = batch.slots[weights.group], self._layer(layer_id)
        return absorb_new_queries(q, kv, weights, batch.positions, slots, cache, pdl=self.pdl)

    def _decode(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        work = batch.work[weights.group]
        assert isinstance(work, DecodeWork), "a decode step begins with `begin`"
        rows = RowsWork(batch.block_tables[weights.group], batch.seq_lens, (work.division,))
        return self._attend_rows(self._absorbed(q, kv, weights, layer_id, batch), weights, layer_id, rows, layer_id)

    def _rows_of(self, batch: ForwardBatch, group: int, num_layers: int) -> RowsWork:
        """Return the tokens of a prompt step as rows."""
        num_seqs = batch.seq_lens.shape[0]
        tokens = torch.arange(batch.token_ids.shape[0], dtype=torch.int32, device=batch.seq_lens.device)
        seqs = torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True).clamp_(max=num_seqs - 1)
        seq_lens = torch.where(batch.slots[group] >= 0, batch.positions + 1, 0)
        return self._rows(batch.block_tables[group][seqs], seq_lens, num_layers)

    def _rows(self, block_tables: Tensor, seq_lens: Tensor, num_layers: int) -> RowsWork:
        """Return rows with their division, a few in a launch."""
        divisions = (self._divide(some, num_layers) for some in seq_lens.split(ROWS_AT_ONCE))
        return RowsWork(block_tables, seq_lens, tuple(divisions))

    def _attend_queries(self, absorbed: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Attend tiles of absorbed queries to whole contexts."""
        summed = latent_query_attention(
            q=absorbed,
            cache=self._layer(layer_id),
            weights=weights,
            block_tables=batch.block_tables[weights.group],
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            gpu=self._gpu,
        )
        return latent_values(summed, weights, pdl=self.pdl).flatten(1)

    def _attend_rows(
        self,
        absorbed: Tensor,
        weights: LatentWeights,
        layer_id: int,
        work: RowsWork,
        divided_layer: int,  # place of the layer among those that divisions count for
    ) -> Tensor:
        """Attend each row of absorbed queries to the latents of its own table."""
        at_once = ROWS_AT_ONCE if len(work.divisions) > 1 else max(1, absorbed.shape[0])
        launches = zip(*(each.split(at_once) for each in (absorbed, work.block_tables, work.seq_lens)), strict=True)
        summed = [
            latent_decode_attention(
                q=q,
                cache=self._layer(layer_id),
                weights=weights,
                block_tables=tables,
                seq_lens=seq_lens,
                division=division,
                workspace=self._workspace(weights.rank),
                layer_id=divided_layer,
                gpu=self._gpu,
                pdl=self.pdl,
            )
            for division, (q, tables, seq_lens) in zip(work.divisions, launches, strict=True)
        ]
        return latent_values(torch.cat(summed) if len(summed) > 1 else summed[0], weights, pdl=self.pdl).flatten(1)

    def _expanded(self, q: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Attend over keys and values of as many heads at once as fit into `EXPANDED_BYTES`."""
        cache, table = self._layer(layer_id), batch.block_tables[weights.group]
        entries = gather_latents(cache, table, batch.seq_lens, batch.num_keys)
        latents = entries[:, : weights.rank]
        out = q.new_empty((q.shape[0], self.num_heads, weights.value_dim))
        head_bytes = entries.shape[0] * weights.expand.shape[1] * q.element_size()
        at_once = max(1, EXPANDED_BYTES // head_bytes)
        for first in range(0, self.num_heads, at_once):
            some = weights.expand[first : first + at_once]
            expanded = functional.linear(latents, some.flatten(0, 1)).unflatten(1, some.shape[:2])
            latent_prompt_attention(
                q=q,
                entries=entries,
                expanded=expanded,
                weights=weights,
                cu_seqlens=batch.cu_seqlens,
                seq_lens=batch.seq_lens,
                max_query_len=batch.max_query_len,
                gpu=self._gpu,
                out=out,
                first_head=first,
            )
        return out.flatten(1)

    def _by_law(self, q: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        cache, table, absorbed = self._layer(layer_id), batch.block_tables[weights.group], batch.one_token_each
        return reference.latent_attention(q, cache, table, batch, weights, is_absorbed=absorbed).flatten(1)

    def _divide(self, seq_lens: Tensor, num_layers: int) -> Division:
        return divide(seq_lens, num_groups(self.num_heads), self._num_slots, num_layers, pdl=self.pdl)

    def _workspace(self, rank: int) -> PartsWorkspace:
        """Return room for parts of contexts, made by the first step, before the capture of any graph."""
        with self._making:
            if self._parts is None:
                groups = num_groups(self.num_heads)
                max_joins = limits_for(self._max_rows, groups, self._num_slots).max_joins
                self._parts = make_workspace(max_joins, self.num_heads, groups, rank, self.cache.device)
            return self._parts
