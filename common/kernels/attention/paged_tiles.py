"""Copies of keys and values from the blocks of a sequence into tiles in shared memory. Gluon, Hopper only."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


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
    mbarrier.expect(arrived, 2 * k_tile.shape[0] * k_tile.shape[1] * 2)
    for i in gl.static_range(k_tile.shape[0] // BLOCK_SIZE):
        k_slice = k_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        v_slice = v_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        tma.async_copy_global_to_shared(pool_desc, [rows[i], column], arrived, k_slice)
        tma.async_copy_global_to_shared(pool_desc, [rows[i] + BLOCK_SIZE, column], arrived, v_slice)


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
