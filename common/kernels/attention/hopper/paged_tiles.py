"""Copies of keys and values from the blocks of a sequence into tiles in shared memory. Gluon, Hopper only."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.kernels.attention.decode_division import load_item, next_item
from common.kernels.base.items import advance, announce


@gluon.jit
def rows_of_tile(
    table_ptr,  # of the sequence
    tile,
    first_block,  # places of the sequence before it are out of sight; 0 without a window
    num_blocks,  # of the sequence
    block_rows,
    layer_row,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return the pool's rows at which keys of each block of a tile begin; rows of missing blocks lie before the pool.

    Reads before the pool give zeros.
    """
    rows = ()
    for i in gl.static_range(TILE // BLOCK_SIZE):
        index = tile * (TILE // BLOCK_SIZE) + i
        exists = index < num_blocks
        if WINDOW > 0:
            exists = exists & (index >= first_block)
        block = gl.load(table_ptr + index, mask=exists, other=-1)
        rows = rows + (block * block_rows + layer_row,)  # type: ignore[assignment]
    return rows


@gluon.jit
def copy_tile(
    pool_desc,  # [num_blocks * block_rows, NUM_KV * HEAD_DIM], tiles of BLOCK_SIZE x HEAD_DIM
    rows,  # of `rows_of_tile`
    column,
    k_tile,  # [TILE, HEAD_DIM], shared memory
    v_tile,
    arrived,  # barrier of both tiles
    BLOCK_SIZE: gl.constexpr,
):
    """Begin loading the keys and values of a tile."""
    mbarrier.expect(arrived, 2 * k_tile.shape[0] * k_tile.shape[1] * (k_tile.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(k_tile.shape[0] // BLOCK_SIZE):
        k_slice = k_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        v_slice = v_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        tma.async_copy_global_to_shared(pool_desc, [rows[i], column], arrived, k_slice)
        tma.async_copy_global_to_shared(pool_desc, [rows[i] + BLOCK_SIZE, column], arrived, v_slice)


@gluon.jit
def fetch(
    shared, division, pool,  # as in the kernel
    NUM_KV: gl.constexpr, BLOCK_SIZE: gl.constexpr, ITEM_WORDS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Fetch tiles of keys and values of every item, as slots become free, and draw items: the task of a warp."""
    k_ring, v_ring, _, _, item_smem, item_full, item_empty, full, empty = shared
    items_ptr, counts_ptr, draws_ptr = division
    pool_desc, _, block_tables_ptr, table_stride, block_rows, layer_row = pool
    STAGES: gl.constexpr = k_ring.shape[0]
    TILE: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    item = gl.program_id(0)
    seq, seq_len, begin, end, _, _ = load_item(items_ptr + item // NUM_KV * ITEM_WORDS)  # perhaps of no item
    num_items = gl.load(counts_ptr) * NUM_KV
    slot = 0
    phase = 1  # the first wait for an empty slot returns at once
    item_phase = 1
    while item < num_items:
        num_blocks = (gl.maximum(seq_len - 1, 0) + BLOCK_SIZE - 1) // BLOCK_SIZE  # with keys of earlier steps
        first_block = 0
        if WINDOW > 0:
            first_block = gl.maximum(seq_len - WINDOW, 0) // BLOCK_SIZE
        table_ptr = block_tables_ptr + seq.to(gl.int64) * table_stride
        column = item % NUM_KV * HEAD_DIM
        for tile in range(begin, end):
            rows = rows_of_tile(
                table_ptr, tile, first_block, num_blocks, block_rows, layer_row, BLOCK_SIZE, TILE, WINDOW
            )
            mbarrier.wait(empty.index(slot), phase)
            copy_tile(pool_desc, rows, column, k_ring.index(slot), v_ring.index(slot), full.index(slot), BLOCK_SIZE)
            slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(item_empty, item_phase)  # so that no item is drawn long before its computation
        item = next_item(draws_ptr, num_items)
        announce(item, item_smem, item_empty, item_phase)
        mbarrier.arrive(item_full, count=1)
        item_phase ^= 1
        seq, seq_len, begin, end, _, _ = load_item(items_ptr + gl.minimum(item, num_items - 1) // NUM_KV * ITEM_WORDS)


@gluon.jit
def clear_begin(v_tile, first_key, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the values before a window in its first block; see `clear_end`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, layout))
    for i in gl.static_range(TILE // BLOCK_SIZE):
        gone = first_key - i * BLOCK_SIZE
        if (gone > 0) & (gone < BLOCK_SIZE):
            v_slice = v_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
            values = v_slice.load(layout)
            v_slice.store(gl.where((rows < gone)[:, None], gl.zeros_like(values), values))


@gluon.jit
def clear_end(v_tile, num_keys, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the values behind the context's end in the last block: the weight there is 0, but NaN times 0 is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, layout))
    for i in gl.static_range(TILE // BLOCK_SIZE):
        left = num_keys - i * BLOCK_SIZE
        if (left > 0) & (left < BLOCK_SIZE):
            v_slice = v_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
            values = v_slice.load(layout)
            v_slice.store(gl.where((rows < left)[:, None], values, gl.zeros_like(values)))


def descriptor(kv_cache: Tensor) -> TensorDescriptor:
    """Describe the pool as rows, a token's K or V in a layer; a tile is a head of a block."""
    block_size, num_kv, head_dim = kv_cache.shape[3:]
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}.get(kv_cache.dtype, gl.float8e4nv)
    tile = [block_size, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return TensorDescriptor.from_tensor(kv_cache.view(-1, num_kv * head_dim), tile, layout)
