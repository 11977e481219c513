"""Absorbed attention of rows: single tokens, each with a context that is divided among programs."""

from threading import Lock

import torch
from torch import Tensor

from common.kernels.attention.decode_division import divide, limits_for
from common.kernels.attention.decode_parts import PartsWorkspace, make_workspace
from common.kernels.base.attention_operands import Division
from common.kernels.base.gpu import Gpu, gpu_of
from common.kernels.base.latent_operands import LatentWeights
from common.kernels.latent.decode_attention import (
    PROGRAMS_PER_SM,
    latent_decode_attention,
    latent_parts_bytes,
    num_groups,
)
from common.kernels.latent.values import latent_values
from common.ops.base import ForwardBatch, RowsWork

ROWS_AT_ONCE = 64
"""Rows of a prompt step that attend in a launch."""


def rows_bytes(num_heads: int, rank: int, max_num_seqs: int, gpu: Gpu) -> int:
    """Return the bytes of the workspace for parts of contexts."""
    return latent_parts_bytes(max(max_num_seqs, ROWS_AT_ONCE), num_heads, rank, gpu)


class LatentRows:
    """Attention of rows over the latents of a group of layers.

    Args:
        cache: `[num_blocks, num_layers, 1, block_size, 1, rank + rope_dim]`.
        max_num_seqs: most rows of a decode step.
        pdl: launch kernels before their predecessors have finished.
    """

    def __init__(self, cache: Tensor, num_heads: int, max_num_seqs: int, *, pdl: bool) -> None:
        self.cache = cache
        self.num_heads = num_heads
        self.pdl = pdl
        self._gpu = gpu_of(cache.device)
        self._max_rows = max(max_num_seqs, ROWS_AT_ONCE)
        self._num_slots = PROGRAMS_PER_SM * self._gpu.num_sms
        self._making = Lock()
        self._parts: PartsWorkspace | None = None

    def of_decode(self, batch: ForwardBatch, group: int) -> RowsWork:
        """Return the rows of a decode step, for all layers."""
        division = self._divide(batch.seq_lens, self.cache.shape[1])
        return RowsWork(batch.block_tables[group], batch.seq_lens, (division,))

    def of_tokens(self, batch: ForwardBatch, group: int) -> RowsWork:
        """Return all tokens of a prompt step as rows, for all layers."""
        num_seqs = batch.seq_lens.shape[0]
        tokens = torch.arange(batch.token_ids.shape[0], dtype=torch.int32, device=batch.seq_lens.device)
        seqs = torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True).clamp_(max=num_seqs - 1)
        seq_lens = torch.where(batch.slots[group] >= 0, batch.positions + 1, 0)
        return self._rows(batch.block_tables[group][seqs], seq_lens, self.cache.shape[1])

    def of_last(self, batch: ForwardBatch, group: int) -> RowsWork:
        """Return the last tokens of a prompt step as rows, for a single layer."""
        return self._rows(batch.block_tables[group], batch.seq_lens, 1)

    def attend(
        self, absorbed: Tensor, weights: LatentWeights, layer_id: int, work: RowsWork, *, is_alone: bool = False
    ) -> Tensor:
        """Return values `[num_rows, num_heads * value_dim]` for absorbed queries of the rows.

        Args:
            is_alone: `work` is for this layer alone.
        """
        at_once = ROWS_AT_ONCE if len(work.divisions) > 1 else max(1, absorbed.shape[0])
        launches = zip(*(each.split(at_once) for each in (absorbed, work.block_tables, work.seq_lens)), strict=True)
        summed = [
            latent_decode_attention(
                q=q,
                cache=self.cache[:, layer_id, 0, :, 0],
                weights=weights,
                block_tables=tables,
                seq_lens=seq_lens,
                division=division,
                workspace=self._workspace(weights.rank),
                layer_id=0 if is_alone else layer_id,
                gpu=self._gpu,
                pdl=self.pdl,
            )
            for division, (q, tables, seq_lens) in zip(work.divisions, launches, strict=True)
        ]
        return latent_values(torch.cat(summed) if len(summed) > 1 else summed[0], weights, pdl=self.pdl).flatten(1)

    def _rows(self, block_tables: Tensor, seq_lens: Tensor, num_layers: int) -> RowsWork:
        divisions = (self._divide(some, num_layers) for some in seq_lens.split(ROWS_AT_ONCE))
        return RowsWork(block_tables, seq_lens, tuple(divisions))

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
