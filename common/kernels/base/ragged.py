"""Tiles of a ragged batch: sequences cut into tiles of `SIZE` rows, all on one axis.

A sequence i whose rows begin at row `begin` of the batch owns the tiles from `begin // SIZE + i`. A sequence owns at
least as many tiles as needed. The number of all tiles follows from sizes known to the host, so a grid fits without
reading a length back. Few tiles are idle, with long sequences or many short ones.
"""

import triton
import triton.language as tl


@triton.jit
def first_tile(begin, seq, SIZE: tl.constexpr):
    return begin // SIZE + seq


@triton.jit
def sequence_of(
    tile,
    begins,  # [MAX_SEQS] int32: first row of each sequence
    seqs,  # [MAX_SEQS] int32: 0, 1, ...
    num_seqs,
    SIZE: tl.constexpr,
):
    """Return the sequence that owns the tile; the sequence may not need the tile."""
    begun = (first_tile(begins, seqs, SIZE) <= tile) & (seqs < num_seqs)
    return tl.sum(begun.to(tl.int32), axis=0) - 1


@triton.jit
def tile_of(
    tile,
    cu_seqlens_ptr,  # [num_seqs + 1] int32: begins of the sequences' rows, then the end
    seqs,  # [MAX_SEQS] int32: 0, 1, ...
    num_seqs,
    SIZE: tl.constexpr,
):
    """Return the sequence that owns the tile, the begin and the end of its rows, and the first row of the tile.

    If the sequence does not need the tile, the first row is not before the end.
    """
    begins = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
    seq = sequence_of(tile, begins, seqs, num_seqs, SIZE)
    begin = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    return seq, begin, end, begin + (tile - first_tile(begin, seq, SIZE)) * SIZE


@triton.jit
def first_seen(seq_len, query_len, WINDOW: tl.constexpr):
    """Return the first key that a sequence's first query sees through a window, as a number or a tensor; 0 without."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
    return first


def num_tiles(num_rows: int, num_seqs: int, size: int) -> int:
    """Return the number of tiles owned by any `num_seqs` sequences of `num_rows` rows in all."""
    return num_rows // size + num_seqs


def max_seqs_for(num_seqs: int) -> int:
    """Return a power of two, equal for most batches, so that kernels are seldom compiled."""
    return max(64, 1 << (num_seqs - 1).bit_length())
