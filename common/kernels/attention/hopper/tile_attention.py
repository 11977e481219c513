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

from common.kernels.attention.hopper.columns import column_max
from common.kernels.attention.hopper.paged_tiles import clear_begin, clear_end
from common.kernels.attention.hopper.register_tiles import keys_operand, values_operand


@gluon.jit
def attend_tile(
    shared, warps_smem, part, slot, phase, first_key, num_keys, scale_log2,
    BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Fold a tile's keys `first_key` to `num_keys` into a part; free its slot. Without WINDOW, from 0.

    Keys and values of 8 bits are multiplied from registers, and only for them `warps_smem` is used (`column_max`).
    """
    k_ring, v_ring, q_smem, p_smem, _, _, _, full, empty = shared
    acc, row_max, sums = part
    TILE: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    IS_NARROW: gl.constexpr = k_ring.dtype != q_smem.dtype
    mma: gl.constexpr = sums.type.layout
    tile_keys = gl.arange(0, TILE, gl.SliceLayout(1, mma))
    mbarrier.wait(full.index(slot), phase)
    q = q_smem.permute((1, 0))
    k_tile = k_ring.index(slot)
    if IS_NARROW:
        keys = keys_operand(k_tile, mma)
        scores = warpgroup_mma(keys, q, gl.zeros_like(sums), use_acc=False, is_async=True)
        values = values_operand(v_ring.index(slot), first_key, num_keys, mma)
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        scores = warpgroup_mma(k_tile, q, gl.zeros_like(sums), use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if num_keys < TILE:
            clear_end(v_ring.index(slot), num_keys, BLOCK_SIZE, TILE, HEAD_DIM)
    seen = tile_keys < num_keys
    if WINDOW > 0:
        if not IS_NARROW:  # noqa: SIM102 - known to the compiler, unlike the keys
            if first_key > 0:
                clear_begin(v_ring.index(slot), first_key, BLOCK_SIZE, TILE, HEAD_DIM)
        seen = seen & (tile_keys >= first_key)
    scores = gl.where(seen[:, None], scores * scale_log2, -1e38)
    new_max = gl.maximum(row_max, column_max(scores, warps_smem) if IS_NARROW else gl.max(scores, axis=0))
    weights = gl.exp2(scores - new_max[None, :])
    decay = gl.exp2(row_max - new_max)[None, :]
    p_smem.permute((1, 0)).store(weights.to(p_smem.dtype))
    fence_async_shared()
    tl.debug_barrier()
    if IS_NARROW:
        acc = warpgroup_mma(values, p_smem.permute((1, 0)), acc * decay, is_async=True)
    else:
        acc = warpgroup_mma(v_ring.index(slot).permute((1, 0)), p_smem.permute((1, 0)), acc * decay, is_async=True)
    sums = gl.fma(sums, decay + gl.zeros_like(sums), weights)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot), count=1)
    return acc, new_max, sums
