"""Tiles of a product of many tokens, fetched by a warp and multiplied by two groups of four: shared by such products.

Each multiprocessor has a program, which draws tiles (`items`). One warp fetches operands by the tensor memory
accelerator. Two groups of four warps multiply, ROWS tokens each, by both halves of a tile of weights. The halves lie
beside each other in shared memory and are one operand to the matrix unit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.base.items import advance, announce, draw

ROWS = 64  # tokens of a group of four warps, multiplied at once
HALF = 128  # rows of half a tile of weights
BAND = 32  # tiles of tokens that take turns at the same weights, which stay in the L2 cache meanwhile


@gluon.jit
def make_slots(
    x_desc,
    weight_desc,
    out_desc,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Return slots of tokens, weights, results `[2, ROWS, WIDTH]` and an item, and their barriers, all empty.

    Without `out_desc` there are no slots of results.
    """
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, BLOCK_K], x_desc.layout)
    weight_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * HALF, BLOCK_K], weight_desc.layout)
    out_smem = x_ring
    if out_desc is not None:
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS, WIDTH], out_desc.layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(item_full, count=1)
    mbarrier.init(item_empty, count=2)  # both groups
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    return x_ring, weight_ring, out_smem, item_smem, item_full, item_empty, full, empty


@gluon.jit
def place(item, tiles_m, tiles_n, BAND: gl.constexpr):
    """Return an item's tile of tokens and tile of outputs."""
    band = item // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    within = item - band * (BAND * tiles_n)
    return band * BAND + within % height, within // height


@gluon.jit
def fetch(
    shared,
    work,
    x_desc,
    weight_desc,
    ticket_ptr,
    n,
    GATED: gl.constexpr,
    BAND: gl.constexpr,
    splits=1,
):
    """Draw items and fetch tiles of tokens and weights, as slots become free: the task of a warp.

    If GATED, halves of weights are of gate and of up; else they follow each other. `splits` items after each other have
    the same tiles, and `steps` each of K. Past the end of K, zeros are fetched.
    """
    x_ring, weight_ring, _, item_smem, item_full, item_empty, full, empty = shared
    tiles_m, tiles_n, steps = work
    STAGES: gl.constexpr = weight_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    HALF: gl.constexpr = weight_ring.shape[1] // 2
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    SLOT_BYTES: gl.constexpr = (2 * ROWS + 2 * HALF) * BLOCK_K * x_ring.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1  # the first wait for an empty slot returns at once
    item_phase = 1
    item = draw(ticket_ptr)
    while item < tiles_m * tiles_n * splits:
        tile_m, tile_n = place(item // splits, tiles_m, tiles_n, BAND)
        announce(item, item_smem, item_empty, item_phase)
        mbarrier.arrive(item_full, count=1)
        item_phase ^= 1
        for step in range(steps):
            start = (item % splits * steps + step) * BLOCK_K
            barrier = full.index(slot)
            weights = weight_ring.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(barrier, SLOT_BYTES)
            for half in gl.static_range(2):  # halves of the tokens, for a group each; of the weights
                row = (2 * tile_m + half) * ROWS
                tma.async_copy_global_to_shared(x_desc, [row, start], barrier, x_ring.index(2 * slot + half))
                first = half * n + tile_n * HALF if GATED else (2 * tile_n + half) * HALF
                rows = weights.slice(half * HALF, HALF)
                tma.async_copy_global_to_shared(weight_desc, [first, start], barrier, rows)
            slot, phase = advance(slot, phase, STAGES)
        item = draw(ticket_ptr)
    announce(item, item_smem, item_empty, item_phase)  # no item: the groups end
    mbarrier.arrive(item_full, count=1)


@gluon.jit
def multiply(shared, steps, slot, phase, acc, GROUP: gl.constexpr):
    """Add a group's product over all of K to `acc`; return it, and the next slot and phase."""
    x_ring, weight_ring, _, _, _, _, full, empty = shared
    STAGES: gl.constexpr = weight_ring.shape[0]
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        weights = weight_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(x_ring.index(2 * slot + GROUP), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the product before has ended, and its slot is free
        mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1, pred=step > 0)
        slot, phase = advance(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
    return acc, slot, phase


@gluon.jit
def store(out, out_desc, row, column, y):
    """Begin to store a group's tile, once the tile before has left shared memory."""
    tma.store_wait(0)
    out.store(y.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], out)
