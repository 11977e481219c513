"""Law of what changes a decode step's rows, and of copies of blocks."""

import torch
from torch import Tensor

from common.kernels.base.row_operands import HEAD_WORDS, RowState, RowUpdates
from common.kernels.base.sampling_operands import TokenRing
from common.ops.base import ForwardBatch


def gather_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy whole blocks between pools `[num_blocks, block_bytes]` uint8."""
    target[target_ids.long()] = source[source_ids.long()]


def row_slots(positions: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Return slots of rows' positions, by `block_tables [num_rows, max_blocks]`: `[num_rows]` int64, -1 for padding."""
    positions = positions.long()
    blocks = block_tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
    return torch.where(seq_lens > 0, blocks * block_size + positions % block_size, -1)


def advance(batch: ForwardBatch, tokens: Tensor) -> None:
    """Make `tokens [num_rows]` int32 the last tokens of a decode batch's rows; padding stays padding.

    A row with NO_CHOICE stays as it is. A row of length `max_seq_len` keeps this length, because the block table names
    no further block.
    """
    has_choice = tokens >= 0
    grows = (has_choice & (batch.seq_lens > 0) & (batch.seq_lens < batch.max_seq_len)).int()
    batch.token_ids.copy_(torch.where(has_choice, tokens, batch.token_ids))
    batch.positions.add_(grows)
    batch.seq_lens.add_(grows)


def land(tokens: Tensor, ring: TokenRing) -> None:
    """Leave `tokens [num_rows]` int32 where the host finds them; waits for the device."""
    turns = ring.turns[: tokens.shape[0]]
    ring.tokens_cpu[torch.arange(tokens.shape[0]), turns.cpu().long()] = tokens.cpu()
    turns.copy_((turns + 1) % ring.tokens_cpu.shape[1])


def update_rows(state: RowState, updates: RowUpdates) -> None:
    """Write the updates into the state; rows may change places."""
    num_rows, num_entries = updates.num_rows, updates.num_entries
    heads, places, words, _ = updates.words.split(
        (
            HEAD_WORDS * num_rows,
            num_entries,
            num_entries,
            updates.words.numel() - HEAD_WORDS * num_rows - 2 * num_entries,
        )
    )
    rows, sources, tokens, seq_lens = heads.view(num_rows, HEAD_WORDS).long().unbind(1)
    moved = state.token_ids[sources.clamp(min=0)]  # a copy, so rows may change places
    moved_lens = state.seq_lens[sources.clamp(min=0)]
    seq_lens = torch.where(sources >= 0, moved_lens, seq_lens.int())
    state.token_ids[rows] = torch.where(sources >= 0, moved, tokens.int())
    state.seq_lens[rows] = seq_lens
    state.positions[rows] = (seq_lens - 1).clamp(min=0)
    state.words[places.long()] = words
