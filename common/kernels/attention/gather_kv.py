"""Copy of K and V of ragged sequences from their blocks into contiguous memory, read in tiles of keys.

With a window, keys out of sight of a sequence's first query are left out, but for a part of the first tile. A tile
holds keys of a single sequence, and zeros beside them. A masked key has weight 0, but 0 times another sequence's values
or unwritten memory need not be 0. Tiles are placed as in `ragged`.

`place_of` and `fetch` find and read the copy's tiles within `long_attention`, and so they are written in Gluon.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from common.kernels.base.checks import check_caches, check_column
from common.kernels.base.e4m3 import is_e4m3, widened
from common.kernels.base.items import advance, announce, draw
from common.kernels.base.ragged import first_seen, first_tile, max_seqs_for, num_tiles, sequence_of, tile_of

TILE = 128  # keys, by default
TOKENS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # both differ from batch to batch
def _gather_kv_kernel(
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # as k_cache_ptr
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    cu_seqlens_ptr,  # [num_seqs + 1] int32: begins of queries; None without WINDOW
    k_ptr,  # [num_rows, num_kv, head_dim], contiguous
    v_ptr,  # as k_ptr
    zeroed_ptr,  # [1] int32, set to 0 for the kernel that follows
    num_seqs,
    table_stride,
    stride_block,  # of both caches, in elements, as is stride_token
    stride_token,
    WIDTH: tl.constexpr,  # num_kv * head_dim
    COLUMNS: tl.constexpr,  # power of two, at least WIDTH
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,  # divides TILE
    WINDOW: tl.constexpr,
):
    """Grid: (num_rows // TOKENS,). A program copies TOKENS rows of a tile, K and V."""
    row = tl.program_id(0) * TOKENS
    if row == 0:
        tl.store(zeroed_ptr, 0)
    seqs = tl.arange(0, MAX_SEQS)
    lens = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    if WINDOW > 0:
        query_begins = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
        query_ends = tl.load(cu_seqlens_ptr + seqs + 1, mask=seqs < num_seqs, other=0)
        lens -= first_seen(lens, query_ends - query_begins, WINDOW) // TILE * TILE
    begins = tl.cumsum(lens, axis=0) - lens
    seq = sequence_of(row // TILE, begins, seqs, num_seqs, TILE)
    begin = tl.sum(tl.where(seqs < seq, lens, 0), axis=0)
    first_token = row - first_tile(begin, seq, TILE) * TILE
    seq_len = tl.load(seq_lens_ptr + seq)
    first_key = 0
    if WINDOW > 0:
        query_len = tl.load(cu_seqlens_ptr + seq + 1) - tl.load(cu_seqlens_ptr + seq)
        first_key = first_seen(seq_len, query_len, WINDOW)
        first_token += first_key // TILE * TILE
    if first_token >= tl.cdiv(seq_len, TILE) * TILE:  # a tile not needed by the sequence
        return

    tokens = first_token + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    present = tokens < seq_len
    if WINDOW > 0:
        present = present & (tokens >= first_key)
    inside = (columns < WIDTH)[None, :]
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    source = (blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token)[:, None] + columns[None, :]
    target = (row + tl.arange(0, TOKENS)).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    k = tl.load(k_cache_ptr + source, mask=present[:, None] & inside, other=0.0)
    v = tl.load(v_cache_ptr + source, mask=present[:, None] & inside, other=0.0)
    tl.store(k_ptr + target, widened(k, k_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + target, widened(v, v_ptr.dtype.element_ty), mask=inside)


def gather_kv(
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided, heads contiguous
    v_cache: Tensor,  # laid out alike
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32
    num_keys: int,  # at least the sum of seq_lens; with a window, of keys from the first tile seen on
    *,
    tile: int = TILE,
    window: int = 0,
    cu_seqlens: Tensor | None = None,  # [num_seqs + 1] int32: begins of queries, with a window
    dtype: torch.dtype | None = None,  # of the copy of an e4m3 cache
    zeroed: Tensor,  # [1] int32: a counter of the kernel that reads the copy; no other launch resets it
) -> Tensor:
    """Gather `[2, num_rows, num_kv_heads * head_dim]`: K, then V; set `zeroed` to 0 on the way.

    Sequence i has its keys from row `tile * first_tile(keys of the sequences before, i, tile)`. Zeros follow up to the
    end of the sequence's last tile; rows of tiles that no sequence needs stay unwritten. With a window, the first tile
    is that of the first key seen, and zeros stand for keys out of sight. Scales of an e4m3 cache are not applied.
    """
    num_seqs, width = seq_lens.shape[0], k_cache.shape[2] * k_cache.shape[3]
    check_caches(k_cache, v_cache, k_cache.shape[3])
    assert k_cache.stride()[2:] == (k_cache.shape[3], 1), f"cache strides {k_cache.stride()}: contiguous heads needed"
    check_column("zeroed", zeroed, 1)
    num_rows = num_tiles(num_keys, num_seqs, tile) * tile
    if window:
        assert cu_seqlens is not None, "with a window, queries tell what is seen"
        check_column("cu_seqlens", cu_seqlens, num_seqs + 1)
    assert is_e4m3(k_cache) == (dtype is not None), f"cache of {k_cache.dtype}, copy in {dtype}: e4m3 is widened"
    out = torch.empty((2, num_rows, width), dtype=dtype or k_cache.dtype, device=k_cache.device)
    _gather_kv_kernel[(num_rows // TOKENS_PER_PROGRAM,)](
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=block_tables,
        seq_lens_ptr=seq_lens,
        cu_seqlens_ptr=cu_seqlens if window else None,
        k_ptr=out[0],
        v_ptr=out[1],
        zeroed_ptr=zeroed,
        num_seqs=num_seqs,
        table_stride=block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BLOCK_SIZE=k_cache.shape[1],
        MAX_SEQS=max_seqs_for(num_seqs),
        TILE=tile,
        TOKENS=TOKENS_PER_PROGRAM,
        WINDOW=window,
        num_warps=8,
    )
    return out


@gluon.jit
def place_of(
    item, work,
    NUM_Q: gl.constexpr, MAX_SEQS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Locate an item's queries and keys; a query tile not needed by the sequence has no key tiles.

    Returns the row of key 0, perhaps before all rows, and the key tiles seen: the first, and the one behind the last.
    All heads of a query tile follow each other, to read the same keys at about the same time.
    """
    cu_seqlens_ptr, seq_lens_ptr, num_seqs, num_query_tiles = work
    tile = num_query_tiles - 1 - item // NUM_Q
    head = item % NUM_Q
    seqs = gl.arange(0, MAX_SEQS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    seq, token, token_end, first_token = tile_of(tile, cu_seqlens_ptr, seqs, num_seqs, BLOCK_M)
    query_len, first_query = token_end - token, first_token - token
    lens = gl.load(seq_lens_ptr + seqs, mask=seqs < seq, other=0)
    if WINDOW > 0:
        begins = gl.load(cu_seqlens_ptr + seqs, mask=seqs < seq, other=0)
        ends = gl.load(cu_seqlens_ptr + seqs + 1, mask=seqs < seq, other=0)
        lens -= first_seen(lens, ends - begins, WINDOW) // BLOCK_N * BLOCK_N
    first_row = first_tile(gl.sum(lens, axis=0), seq, BLOCK_N) * BLOCK_N
    prior = gl.load(seq_lens_ptr + seq) - query_len
    begin = 0
    if WINDOW > 0:
        first_row -= first_seen(prior + query_len, query_len, WINDOW) // BLOCK_N * BLOCK_N
        begin = gl.maximum(prior + first_query + 1 - WINDOW, 0) // BLOCK_N
    end = gl.cdiv(prior + gl.minimum(query_len, first_query + BLOCK_M), BLOCK_N)
    if first_query >= query_len:
        end = begin
    return token, query_len, prior, first_query, head, first_row, begin, end


@gluon.jit
def fetch(
    shared,  # of `long_attention`, as is `work`
    work,
    ticket_ptr, q_desc, kv_desc, num_rows,
    NUM_Q: gl.constexpr, GROUP: gl.constexpr, MAX_SEQS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Draw items and fetch queries, then tiles of K and V by turns, as slots become free: the task of a warp."""
    queries, k_ring, v_ring, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    ROWS: gl.constexpr = queries.shape[1]
    HEAD_DIM: gl.constexpr = queries.shape[2]
    STAGES: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    num_items = work[3] * NUM_Q
    slot = 0
    phase = 1  # the first wait for an empty slot returns at once
    q_phase = 1
    item = draw(ticket_ptr)
    while item < num_items:
        token, _, _, first_query, head, first_row, begin, end = place_of(
            item, work, NUM_Q, MAX_SEQS, 2 * ROWS, BLOCK_N, WINDOW
        )
        column = head // GROUP * HEAD_DIM
        if end > begin:
            announce(item, item_smem, q_empty, q_phase)
            q_phase ^= 1
            mbarrier.expect(q_full, 2 * ROWS * HEAD_DIM * 2)
            for group in gl.static_range(2):
                q_row = token + first_query + group * ROWS
                tma.async_copy_global_to_shared(q_desc, [q_row, head * HEAD_DIM], q_full, queries.index(group))
        for tile in range(begin, end):
            row = first_row + tile * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), BLOCK_N * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(kv_desc, [row, column], k_full.index(slot), k_ring.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), BLOCK_N * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(kv_desc, [num_rows + row, column], v_full.index(slot), v_ring.index(slot))
            slot, phase = advance(slot, phase, STAGES)
        item = draw(ticket_ptr)  # meanwhile the groups have STAGES tiles left
    announce(num_items, item_smem, q_empty, q_phase)  # no item: the groups end
    mbarrier.arrive(q_full, count=1)
