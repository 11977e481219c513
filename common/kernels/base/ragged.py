"""Tiles of a ragged batch: sequences cut into tiles of `SIZE` rows, all on one axis.

Sequence i, whose rows begin at `begin` among the rows of all, owns the tiles from `begin // SIZE + i`.
These are at least as many as it needs, and how many there are in all follows from sizes that the host
knows; so a grid fits without reading a length back, and one long and many short sequences leave few idle.
"""

import triton
import triton.language as tl


@triton.jit
def first_tile(begin, seq, SIZE: tl.constexpr):
    return begin // SIZE + seq


@triton.jit
def sequence_of(
    tile,
    begins,  # [MAX_SEQS] int32: of each sequence, its first row
    seqs,  # [MAX_SEQS] int32: 0, 1, ...
    num_seqs,
    SIZE: tl.constexpr,
):
    """The sequence that owns the tile; it may not need it."""
    begun = (first_tile(begins, seqs, SIZE) <= tile) & (seqs < num_seqs)
    return tl.sum(begun.to(tl.int32), axis=0) - 1


def num_tiles(num_rows: int, num_seqs: int, size: int) -> int:
    """Tiles that any `num_seqs` sequences of `num_rows` rows in all own together."""
    return num_rows // size + num_seqs


def max_seqs_for(num_seqs: int) -> int:
    """A power of two, the same for most batches, so that kernels are seldom compiled."""
    return max(64, 1 << (num_seqs - 1).bit_length())
