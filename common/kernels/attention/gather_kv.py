"""Copy of K and V of ragged sequences from their blocks into contiguous memory, read in tiles of keys.

With a window, keys out of sight of a sequence's first query are left out, but for a part of the first tile. A tile
holds keys of a single sequence, and zeros beside them. A masked key has weight 0, but 0 times another sequence's values
or unwritten memory need not be 0. Tiles are placed as in `ragged`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_caches, check_column
from common.kernels.base.ragged import first_seen, first_tile, max_seqs_for, num_tiles, sequence_of

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
    tl.store(k_ptr + target, k, mask=inside)
    tl.store(v_ptr + target, v, mask=inside)


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
    zeroed: Tensor,  # [1] int32: a counter of the kernel that reads the copy; no other launch resets it
) -> Tensor:
    """Gather `[2, num_rows, num_kv_heads * head_dim]`: K, then V; set `zeroed` to 0 on the way.

    Sequence i has its keys from row `tile * first_tile(keys of the sequences before, i, tile)`. Zeros follow up to the
    end of the sequence's last tile; rows of tiles that no sequence needs stay unwritten. With a window, the first tile
    is that of the first key seen, and zeros stand for keys out of sight.
    """
    num_seqs, width = seq_lens.shape[0], k_cache.shape[2] * k_cache.shape[3]
    check_caches(k_cache, v_cache, k_cache.shape[3])
    assert k_cache.stride()[2:] == (k_cache.shape[3], 1), f"cache strides {k_cache.stride()}: contiguous heads needed"
    check_column("zeroed", zeroed, 1)
    num_rows = num_tiles(num_keys, num_seqs, tile) * tile
    if window:
        assert cu_seqlens is not None, "with a window, queries tell what is seen"
        check_column("cu_seqlens", cu_seqlens, num_seqs + 1)
    out = torch.empty((2, num_rows, width), dtype=k_cache.dtype, device=k_cache.device)
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
