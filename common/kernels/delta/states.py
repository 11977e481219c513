"""Counts of tokens that states have seen: a token run again must not advance its state a second time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_block_tables, check_column
from common.kernels.base.pdl import wait_for_predecessor

BLOCK = 64  # sequences of a program


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _begin_states_kernel(
    counts_ptr,  # count of the first block's state, counts of others block_stride apart; fp32
    block_tables_ptr,  # [num_seqs, 1] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    is_new_ptr,  # [num_seqs] int8
    num_seqs,
    table_stride,
    block_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(num_seqs, BLOCK),). A program takes BLOCK sequences."""
    seqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seqs < num_seqs
    wait_for_predecessor(PDL)
    seq_len = tl.load(seq_lens_ptr + seqs, mask=inside, other=0)
    begin = tl.load(cu_seqlens_ptr + seqs, mask=inside, other=0)
    length = tl.load(cu_seqlens_ptr + seqs + 1, mask=inside, other=0) - begin
    is_real = inside & (seq_len > 0) & (length > 0)
    block = tl.load(block_tables_ptr + seqs.to(tl.int64) * table_stride, mask=is_real, other=0).to(tl.int64)
    count_ptr = counts_ptr + block * block_stride
    start = seq_len - length
    count = tl.load(count_ptr, mask=is_real & (start > 0), other=0.0)
    is_new = is_real & ((start == 0) | (count == start.to(tl.float32)))
    tl.store(count_ptr, seq_len.to(tl.float32), mask=is_new)
    tl.store(is_new_ptr + seqs, is_new.to(tl.int8), mask=inside)


def begin_states(
    states: Tensor,  # [num_blocks, num_layers, 1, 1, num_rows, row_elements] fp32
    block_table: Tensor,  # [num_seqs, 1] int32
    cu_seqlens: Tensor,  # [num_seqs + 1] int32
    seq_lens: Tensor,  # [num_seqs] int32; 0 is padding
    *,
    pdl: bool = False,
) -> Tensor:
    """Tell which sequences bring tokens that their states have not seen, and count these tokens: `[num_seqs]` bool."""
    num_seqs = seq_lens.shape[0]
    check_column("seq_lens", seq_lens, num_seqs)
    check_column("cu_seqlens", cu_seqlens, num_seqs + 1)
    check_block_tables(block_table, num_seqs)
    is_new = torch.empty((num_seqs,), dtype=torch.int8, device=seq_lens.device)
    _begin_states_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        counts_ptr=states[:, 0, 0, 0, -1],
        block_tables_ptr=block_table,
        cu_seqlens_ptr=cu_seqlens,
        seq_lens_ptr=seq_lens,
        is_new_ptr=is_new,
        num_seqs=num_seqs,
        table_stride=block_table.stride(0),
        block_stride=states.stride(0),
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return is_new.view(torch.bool)
