"""Copy of latents of ragged sequences from their blocks into contiguous memory, read in tiles of `TILE` keys.

A tile holds keys of a single sequence, and zeros behind the last key, as in `gather_kv`. Bound by memory: an entry of
1,152 bytes at rank 512 is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_block_tables, check_column
from common.kernels.base.ragged import first_tile, max_seqs_for, num_tiles, sequence_of

TILE = 64
TOKENS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # both differ from batch to batch
def _gather_latents_kernel(
    cache_ptr,  # [num_blocks, block_size, WIDTH], strided
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_rows, WIDTH], contiguous
    num_seqs,
    table_stride,
    stride_block,  # in elements, as is stride_token
    stride_token,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least WIDTH
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,  # divides TILE
):
    """Grid: (num_rows // TOKENS,). A program copies TOKENS rows of a tile."""
    row = tl.program_id(0) * TOKENS
    seqs = tl.arange(0, MAX_SEQS)
    lens = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    begins = tl.cumsum(lens, axis=0) - lens
    seq = sequence_of(row // TILE, begins, seqs, num_seqs, TILE)
    begin = tl.sum(tl.where(seqs < seq, lens, 0), axis=0)
    tokens = row - first_tile(begin, seq, TILE) * TILE + tl.arange(0, TOKENS)
    present = tokens < tl.load(seq_lens_ptr + seq)
    columns = tl.arange(0, COLUMNS)[None, :]
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    source = (blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token)[:, None] + columns
    entries = tl.load(cache_ptr + source, mask=present[:, None] & (columns < WIDTH), other=0.0)
    target = (row + tl.arange(0, TOKENS)).to(tl.int64)[:, None] * WIDTH + columns
    tl.store(out_ptr + target, entries, mask=columns < WIDTH)


def gather_latents(
    cache: Tensor,  # [num_blocks, block_size, width], strided, entries contiguous
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32
    num_keys: int,  # at least the sum of seq_lens
) -> Tensor:
    """Gather `[num_rows, width]`.

    Sequence i has its keys from row `TILE * first_tile(keys of the sequences before, i, TILE)`. All other rows are
    zeros, because values expanded from them are multiplied by weights of 0.
    """
    num_seqs, width = seq_lens.shape[0], cache.shape[2]
    check_block_tables(block_tables, num_seqs)
    check_column("seq_lens", seq_lens, num_seqs)
    assert cache.stride(2) == 1, f"cache strides {cache.stride()}: contiguous entries needed"
    num_rows = num_tiles(num_keys, num_seqs, TILE) * TILE
    out = torch.empty((num_rows, width), dtype=cache.dtype, device=cache.device)
    _gather_latents_kernel[(num_rows // TOKENS_PER_PROGRAM,)](
        cache_ptr=cache,
        block_tables_ptr=block_tables,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        num_seqs=num_seqs,
        table_stride=block_tables.stride(0),
        stride_block=cache.stride(0),
        stride_token=cache.stride(1),
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BLOCK_SIZE=cache.shape[1],
        MAX_SEQS=max_seqs_for(num_seqs),
        TILE=TILE,
        TOKENS=TOKENS_PER_PROGRAM,
        num_warps=4,
    )
    return out
