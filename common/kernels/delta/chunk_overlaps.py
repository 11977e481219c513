"""Overlaps of the tokens of a chunk, for the gated delta rule: all that a chunk needs before the state is known.

A chunk has CHUNK tokens of a sequence, each with a key k, a query q, a decay e^g and a weight beta. With the decay
from token j to a later token i, `since[i, j] = exp(g[j+1] + .. + g[i])`, of a chunk are computed:

    overlap[i, j] = beta[i] (k[i] . k[j]) since[i, j]    j < i
    inverse       = (1 + overlap)^-1 diag(beta)
    scores[i, j]  = (q[i] . k[j]) since[i, j]            j <= i

`chunk_scan` multiplies the values that a chunk changes by `inverse`. Chunks do not depend on each other, so all chunks
of a step are computed at once. Chunks lie on an axis of tiles (`ragged`); results of a tile without tokens are
undefined.

Overlaps and their inverse are fp32; only the finished inverse is rounded. Products of keys take activations as they
are. Products of the inverse are exact to fp32: equal keys make a triangular system that tf32 alone cannot solve.

The inverse is blockwise. Blocks of 16 on the diagonal are inverted by elimination of a row at a time, all four side by
side. Blocks below follow by products of blocks. A program takes a chunk of a head with a single warp, which needs no
barriers between 15 dependent rows. Hundreds of warps fill a GPU.

Both kernels are bound by memory. A token of a value head takes 2 x 64 elements of results, and 64 fp32 in between.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.ragged import max_seqs_for, num_tiles, tile_of

CHUNK = 64
BLOCK = 16  # rows inverted one by one


class Overlaps(NamedTuple):
    """Overlaps of the chunks of a step; a tile is a chunk of CHUNK tokens."""

    inverse: Tensor  # [tiles, value_heads, CHUNK, CHUNK]
    scores: Tensor  # [tiles, value_heads, CHUNK, CHUNK]
    gates: Tensor  # [tiles, value_heads, 3, CHUNK] fp32: decay since the chunk's begin, decay until its end, and beta


@triton.jit(do_not_specialize=["num_seqs"])
def _overlaps_kernel(
    heads_ptr,  # [num_tokens, 2 * NUM_K + NUM_V, DIM]: q, k and v
    gates_ptr,  # [num_tokens, NUM_V, 2] fp32: logarithm of the decay, and beta
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    is_new_ptr,  # [num_seqs] bool
    overlap_ptr,  # [tiles, NUM_V, CHUNK, CHUNK] fp32
    scores_ptr,  # [tiles, NUM_V, CHUNK, CHUNK]
    chunk_gates_ptr,  # [tiles, NUM_V, 3, CHUNK] fp32
    num_seqs,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    DIM: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (NUM_K, tiles). A program takes a chunk of a key head, and all value heads of this key head."""
    key_head = tl.program_id(0)
    tile = tl.program_id(1)
    seq, _, end, first = tile_of(tile, cu_seqlens_ptr, tl.arange(0, MAX_SEQS), num_seqs, CHUNK)
    if first >= end:
        return
    is_new = tl.load(is_new_ptr + seq) != 0
    rows = tl.arange(0, CHUNK)
    inside = first + rows < end
    tokens = (first + rows).to(tl.int64)
    row_ptr = heads_ptr + tokens[:, None] * ((2 * NUM_K + NUM_V) * DIM) + tl.arange(0, DIM)[None, :]
    q = tl.load(row_ptr + key_head * DIM, mask=inside[:, None], other=0.0)
    k = tl.load(row_ptr + (NUM_K + key_head) * DIM, mask=inside[:, None], other=0.0)
    keys_by_keys = tl.dot(k, tl.trans(k), input_precision="ieee")
    queries_by_keys = tl.dot(q, tl.trans(k), input_precision="ieee")
    is_before = rows[:, None] > rows[None, :]
    is_seen = rows[:, None] >= rows[None, :]
    elements = rows[:, None] * CHUNK + rows[None, :]
    for member in range(NUM_V // NUM_K):
        head = key_head * (NUM_V // NUM_K) + member
        gate_ptr = gates_ptr + (tokens * NUM_V + head) * 2
        decay = tl.load(gate_ptr, mask=inside & is_new, other=0.0)
        beta = tl.load(gate_ptr + 1, mask=inside & is_new, other=0.0)
        total = tl.cumsum(decay, axis=0)
        since = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], float("-inf")))
        overlap = tl.where(is_before, beta[:, None] * keys_by_keys * since, 0.0)
        place = tile.to(tl.int64) * NUM_V + head
        tl.store(overlap_ptr + place * (CHUNK * CHUNK) + elements, overlap)
        scores = (queries_by_keys * since).to(scores_ptr.dtype.element_ty)
        tl.store(scores_ptr + place * (CHUNK * CHUNK) + elements, scores)
        out_gates_ptr = chunk_gates_ptr + place * (3 * CHUNK) + rows
        tl.store(out_gates_ptr, tl.exp(total))
        tl.store(out_gates_ptr + CHUNK, tl.exp(tl.sum(tl.where(rows == CHUNK - 1, total, 0.0), axis=0) - total))
        tl.store(out_gates_ptr + 2 * CHUNK, beta)


@triton.jit
def _eliminated(inverse, row_ptr, row, rows):
    """Return the inverse of 1 + a strictly lower block with one more row; `row_ptr` points to that row of the block."""
    change = tl.sum(tl.load(row_ptr + rows)[:, None] * inverse, axis=0)
    return inverse - tl.where((rows == row)[:, None], change[None, :], 0.0)


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _store_block(inverse_ptr, block, beta_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr, CHUNK, BLOCK: tl.constexpr):
    """Store a block of the inverse, its columns times beta."""
    rows = tl.arange(0, BLOCK)
    block = block * tl.load(beta_ptr + COLUMN * BLOCK + rows)[None, :]
    ptr = inverse_ptr + (ROW * BLOCK + rows)[:, None] * CHUNK + (COLUMN * BLOCK + rows)[None, :]
    tl.store(ptr, block.to(inverse_ptr.dtype.element_ty))


@triton.jit
def _invert_kernel(
    overlap_ptr,  # as in the kernel above, like all of the same name
    chunk_gates_ptr,
    inverse_ptr,  # [tiles, NUM_V, CHUNK, CHUNK]
    CHUNK: tl.constexpr,  # four blocks
    BLOCK: tl.constexpr,
):
    """Grid: (tiles * NUM_V,)."""
    place = tl.program_id(0).to(tl.int64)
    overlap_ptr += place * (CHUNK * CHUNK)
    inverse_ptr += place * (CHUNK * CHUNK)
    beta_ptr = chunk_gates_ptr + place * (3 * CHUNK) + 2 * CHUNK
    rows = tl.arange(0, BLOCK)
    DOWN: tl.constexpr = BLOCK * CHUNK  # elements from a block to the one below; BLOCK to the one on the right
    unit = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    d0 = unit
    d1 = unit
    d2 = unit
    d3 = unit
    for row in tl.static_range(1, BLOCK):
        row_ptr = overlap_ptr + row * CHUNK
        d0 = _eliminated(d0, row_ptr, row, rows)
        d1 = _eliminated(d1, row_ptr + (DOWN + BLOCK), row, rows)
        d2 = _eliminated(d2, row_ptr + 2 * (DOWN + BLOCK), row, rows)
        d3 = _eliminated(d3, row_ptr + 3 * (DOWN + BLOCK), row, rows)
    block_ptr = overlap_ptr + rows[:, None] * CHUNK + rows[None, :]
    a10 = tl.load(block_ptr + DOWN)
    a20 = tl.load(block_ptr + 2 * DOWN)
    a21 = tl.load(block_ptr + 2 * DOWN + BLOCK)
    a30 = tl.load(block_ptr + 3 * DOWN)
    a31 = tl.load(block_ptr + 3 * DOWN + BLOCK)
    a32 = tl.load(block_ptr + 3 * DOWN + 2 * BLOCK)
    d10 = -_times(_times(d1, a10), d0)
    d21 = -_times(_times(d2, a21), d1)
    d32 = -_times(_times(d3, a32), d2)
    d20 = -_times(d2, _times(a20, d0) + _times(a21, d10))
    d31 = -_times(d3, _times(a31, d1) + _times(a32, d21))
    d30 = -_times(d3, _times(a30, d0) + _times(a31, d10) + _times(a32, d20))
    _store_block(inverse_ptr, d0, beta_ptr, 0, 0, CHUNK, BLOCK)
    _store_block(inverse_ptr, d10, beta_ptr, 1, 0, CHUNK, BLOCK)
    _store_block(inverse_ptr, d1, beta_ptr, 1, 1, CHUNK, BLOCK)
    _store_block(inverse_ptr, d20, beta_ptr, 2, 0, CHUNK, BLOCK)
    _store_block(inverse_ptr, d21, beta_ptr, 2, 1, CHUNK, BLOCK)
    _store_block(inverse_ptr, d2, beta_ptr, 2, 2, CHUNK, BLOCK)
    _store_block(inverse_ptr, d30, beta_ptr, 3, 0, CHUNK, BLOCK)
    _store_block(inverse_ptr, d31, beta_ptr, 3, 1, CHUNK, BLOCK)
    _store_block(inverse_ptr, d32, beta_ptr, 3, 2, CHUNK, BLOCK)
    _store_block(inverse_ptr, d3, beta_ptr, 3, 3, CHUNK, BLOCK)
    none = tl.zeros((BLOCK, BLOCK), inverse_ptr.dtype.element_ty)
    above_ptr = inverse_ptr + rows[:, None] * CHUNK + rows[None, :]
    for row in tl.static_range(3):
        for column in tl.static_range(row + 1, 4):
            tl.store(above_ptr + row * DOWN + column * BLOCK, none)


def find_overlaps(heads: Tensor, gates: Tensor, weights: DeltaWeights, sequences: Sequences) -> Overlaps:
    """Return overlaps of all chunks; `heads` and `gates` as `convolve_prompts` returns them."""
    num_v, tiles = weights.num_value_heads, num_tiles(heads.shape[0], sequences.num_seqs, CHUNK)
    shape, device = (tiles, num_v, CHUNK, CHUNK), heads.device
    overlap = torch.empty(shape, dtype=torch.float32, device=device)
    inverse, scores = (torch.empty(shape, dtype=heads.dtype, device=device) for _ in range(2))
    chunk_gates = torch.empty((tiles, num_v, 3, CHUNK), dtype=torch.float32, device=device)
    _overlaps_kernel[(weights.num_key_heads, tiles)](
        heads_ptr=heads,
        gates_ptr=gates,
        cu_seqlens_ptr=sequences.cu_seqlens,
        is_new_ptr=sequences.is_new,
        overlap_ptr=overlap,
        scores_ptr=scores,
        chunk_gates_ptr=chunk_gates,
        num_seqs=sequences.num_seqs,
        NUM_K=weights.num_key_heads,
        NUM_V=num_v,
        DIM=heads.shape[2],
        MAX_SEQS=max_seqs_for(sequences.num_seqs),
        CHUNK=CHUNK,
        num_warps=4,
    )
    _invert_kernel[(tiles * num_v,)](
        overlap_ptr=overlap,
        chunk_gates_ptr=chunk_gates,
        inverse_ptr=inverse,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        num_warps=1,
    )
    return Overlaps(inverse, scores, chunk_gates)
