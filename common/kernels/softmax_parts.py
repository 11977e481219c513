"""Attention over parts of a context, joined into attention over all of it by the program that has the parts.

Written in Gluon, for kernels that are; as many loads as registers allow are on the way at once, since a
single program reads what many have written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_CHUNK = 16  # splits whose parts are on the way at once
MAX_ELEMENTS = 8192  # of them: 64 registers a thread of four warps


def chunk_for(num_splits: int, heads: int, head_dim: int) -> int:
    """Splits that a program may have on the way at once: a power of two, as all three arguments are."""
    return max(1, min(num_splits, MAX_CHUNK, MAX_ELEMENTS // (heads * head_dim)))


@gluon.jit
def join_softmax_parts(
    partial_ptr,  # [splits, GROUP, HEAD_DIM] fp32
    lse_ptr,  # [splits, GROUP] fp32, in units of log2
    out_ptr,  # [GROUP, HEAD_DIM]
    num_splits,  # that have keys; the others were never written
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEADS: gl.constexpr,  # power of two, at least GROUP
    CHUNK: gl.constexpr,  # splits whose parts are on the way at once
):
    """Add the parts by their weight in the whole softmax, CHUNK splits after CHUNK splits."""
    layout: gl.constexpr = gl.BlockedLayout(
        [CHUNK, 1, 4], [1, 128 // HEAD_DIM, HEAD_DIM // 4], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    stats: gl.constexpr = gl.SliceLayout(2, layout)  # [CHUNK, HEADS]
    tile: gl.constexpr = gl.SliceLayout(0, layout)  # [HEADS, HEAD_DIM]
    per_head: gl.constexpr = gl.SliceLayout(0, stats)
    heads = gl.arange(0, HEADS, per_head)[None, :]
    out_heads = gl.arange(0, HEADS, gl.SliceLayout(1, tile))[:, None]
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, tile))[None, :]
    row_max = gl.full([HEADS], -1e38, gl.float32, per_head)
    row_sum = gl.zeros([HEADS], gl.float32, per_head)
    out = gl.zeros([HEADS, HEAD_DIM], gl.float32, tile)
    for first in range(0, num_splits, CHUNK):
        splits = first + gl.arange(0, CHUNK, gl.SliceLayout(1, stats))[:, None]
        present = (splits < num_splits) & (heads < GROUP)
        rows = splits * GROUP + heads
        elements = gl.expand_dims(rows, 2) * HEAD_DIM + gl.expand_dims(columns, 0)
        parts = gl.load(partial_ptr + elements, mask=gl.expand_dims(present, 2), other=0.0)
        lse = gl.load(lse_ptr + rows, mask=present, other=-1e38)
        new_max = gl.maximum(row_max, gl.max(lse, axis=0))
        shares = gl.exp2(lse - new_max[None, :])
        decay = gl.exp2(row_max - new_max)
        row_sum = row_sum * decay + gl.sum(shares, axis=0)
        row_max = new_max
        decay = gl.convert_layout(decay, gl.SliceLayout(1, tile))
        out = out * decay[:, None] + gl.sum(parts * gl.expand_dims(shares, 2), axis=0)
    out = out / gl.convert_layout(row_sum, gl.SliceLayout(1, tile))[:, None]
    gl.store(out_ptr + out_heads * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty), mask=out_heads < GROUP)
