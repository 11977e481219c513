"""Latent attention on a GPU over the cache of a group: absorbed for decode steps and few tokens, else expanded.

Absorbed attention reads latents alone. Expanded attention first computes keys and values of all heads, and then takes
fewer products for each pair of a query and a key (`latent.prompt_attention`).
"""

from torch import Tensor
from torch.nn import functional

from common.kernels.base.gpu import Gpu, gpu_of
from common.kernels.elementwise.row_slots import row_slots
from common.kernels.latent.gather_latents import gather_latents
from common.kernels.latent.inputs import absorb_new_queries, absorb_queries, rotate_latent_queries
from common.kernels.latent.prompt_attention import latent_prompt_attention
from common.kernels.latent.query_attention import latent_query_attention
from common.kernels.latent.values import latent_values
from common.ops import reference
from common.ops.base import ForwardBatch, GroupCache, LatentWeights, RowsWork
from common.ops.latent_rows import LatentRows, rows_bytes
from common.settings.config import KernelsSection

FEW_TOKENS = 128
"""Tokens of a step, at most, whose contexts are divided among programs; more tokens fill the GPU without that.

More tokens repay the expansion of keys and values, too, where the host knows how many keys there are.
"""
MAX_KEYS = 131_072
"""Keys of a step, at most, because gathering takes memory; more are attended as latents."""
EXPANDED_BYTES = 256 << 20
"""Keys and values expanded at once, at most; of as many heads as fit."""


def room_bytes(num_heads: int, rank: int, entry_dim: int, max_num_seqs: int, gpu: Gpu) -> int:
    """Return an upper bound of the bytes of workspaces, gathered latents, and keys and values expanded at once."""
    return rows_bytes(num_heads, rank, max_num_seqs, gpu) + EXPANDED_BYTES + MAX_KEYS * entry_dim * 4


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
        self._rows = LatentRows(self.cache, self.num_heads, max_num_seqs, pdl=pdl)

    def row_slots(self, batch: ForwardBatch, block_table: Tensor) -> Tensor:
        """Return slots of the rows of a decode batch: `[num_rows]` int64."""
        return row_slots(batch.positions, batch.seq_lens, block_table, self.cache.shape[3], pdl=self.pdl)

    def divide(self, batch: ForwardBatch, group: int) -> RowsWork | None:
        """Divide the contexts of a decode step, or of few tokens of a prompt step, among programs."""
        if batch.one_token_each:
            return self._rows.of_decode(batch, group) if self.kernels.decode_attention != "torch" else None
        has_few = batch.token_ids.shape[0] <= FEW_TOKENS and self.kernels.prefill_attention != "torch"
        return self._rows.of_tokens(batch, group) if has_few else None

    def attend(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `Ops.latent_attention`."""
        work = batch.work[weights.group]
        if isinstance(work, RowsWork):
            return self._rows.attend(self._absorbed(q, kv, weights, layer_id, batch), weights, layer_id, work)
        if batch.one_token_each or self.kernels.prefill_attention == "torch":
            return self._by_law(self._rotated(q, kv, weights, layer_id, batch), weights, layer_id, batch)
        if 0 < batch.num_keys <= MAX_KEYS:
            return self._expanded(self._rotated(q, kv, weights, layer_id, batch), weights, layer_id, batch)
        return self._attend_queries(self._absorbed(q, kv, weights, layer_id, batch), weights, layer_id, batch)

    def attend_last(self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `Ops.latent_attention_of_last`."""
        q = self._rotated(q, kv, weights, layer_id, batch)[batch.last_tokens]
        if self.kernels.prefill_attention == "torch":
            return self._by_law(q, weights, layer_id, batch.one_query_each())
        work = self._rows.of_last(batch, weights.group)
        return self._rows.attend(absorb_queries(q.flatten(1), weights), weights, layer_id, work, is_alone=True)

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
