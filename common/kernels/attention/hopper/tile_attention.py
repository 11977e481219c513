"""Attention to a tile of keys and values in a decode step. Gluon, Hopper only.

Keys are the tall operand of `wgmma` and queries the short operand, because a group rarely has more than eight heads.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.attention.hopper.paged_tiles import clear_begin, clear_end, widen_tile


@gluon.jit
def attend_tile(
    shared, wide, part, slot, phase, first_key, num_keys, scale_log2, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr
):
    """Fold a tile's keys `first_key` to `num_keys` into a part; free its slot. Without WINDOW, from 0.

    `wide` is room for a tile of keys and a tile of values. If its type differs from that of the rings, tiles are
    converted there before they are multiplied.
    """
    k_ring, v_ring, q_smem, p_smem, _, _, _, full, empty = shared
    acc, row_max, sums = part
    TILE: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    tile_keys = gl.arange(0, TILE, gl.SliceLayout(1, sums.type.layout))
    mbarrier.wait(full.index(slot), phase)
    q = q_smem.permute((1, 0))
    k_tile = k_ring.index(slot)
    IS_WIDE: gl.constexpr = wide.dtype != k_ring.dtype
    if IS_WIDE:
        widen_tile(k_tile, wide.index(0), 0, TILE)
        widen_tile(v_ring.index(slot), wide.index(1), first_key, num_keys)
        k_tile = wide.index(0)
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
    scores = warpgroup_mma(k_tile, q, gl.zeros_like(sums), use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if not IS_WIDE:  # noqa: SIM102 - known to the compiler, unlike the keys
        if num_keys < TILE:
            clear_end(v_ring.index(slot), num_keys, BLOCK_SIZE, TILE, HEAD_DIM)
    seen = tile_keys < num_keys
    if WINDOW > 0:
        if not IS_WIDE:  # noqa: SIM102 - as above
            if first_key > 0:
                clear_begin(v_ring.index(slot), first_key, BLOCK_SIZE, TILE, HEAD_DIM)
        seen = seen & (tile_keys >= first_key)
    scores = gl.where(seen[:, None], scores * scale_log2, -1e38)
    new_max = gl.maximum(row_max, gl.max(scores, axis=0))
    weights = gl.exp2(scores - new_max[None, :])
    decay = gl.exp2(row_max - new_max)[None, :]
    p_smem.permute((1, 0)).store(weights.to(p_smem.dtype))
    fence_async_shared()
    tl.debug_barrier()
    v_tile = wide.index(1) if IS_WIDE else v_ring.index(slot)
    acc = warpgroup_mma(v_tile.permute((1, 0)), p_smem.permute((1, 0)), acc * decay, is_async=True)
    sums = gl.fma(sums, decay + gl.zeros_like(sums), weights)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if not IS_WIDE:
        mbarrier.arrive(empty.index(slot), count=1)
    return acc, new_max, sums
