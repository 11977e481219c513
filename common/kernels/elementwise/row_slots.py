"""Slots where a decode step writes K and V of each row: the first kernel of a step whose attention needs slots."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_block_tables, check_column
from common.kernels.base.pdl import wait_for_predecessor

BLOCK = 128  # rows of a program


@triton.jit(do_not_specialize=["num_rows"])
def _row_slots_kernel(
    positions_ptr,  # [num_rows] int32
    seq_lens_ptr,  # [num_rows] int32, 0 for padding
    block_tables_ptr,  # [num_rows, max_blocks] int32, rows table_stride apart
    slots_ptr,  # [num_rows] int64
    num_rows,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(num_rows, BLOCK),). A program takes BLOCK rows."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    wait_for_predecessor(PDL)
    position = tl.load(positions_ptr + rows, mask=inside, other=0)
    present = inside & (tl.load(seq_lens_ptr + rows, mask=inside, other=0) > 0)
    entry_ptr = block_tables_ptr + rows.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry_ptr, mask=present, other=0).to(tl.int64)
    tl.store(slots_ptr + rows, tl.where(present, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)


def row_slots(
    positions: Tensor,  # [num_rows] int32: of the token whose K and V will be written
    seq_lens: Tensor,  # [num_rows] int32; 0 is padding
    block_tables: Tensor,  # [num_rows, max_blocks] int32
    block_size: int,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return the slot of each row's position, -1 for padding: `[num_rows]` int64."""
    num_rows = positions.shape[0]
    check_column("positions", positions, num_rows)
    check_column("seq_lens", seq_lens, num_rows)
    check_block_tables(block_tables, num_rows)
    slots = torch.empty((num_rows,), dtype=torch.int64, device=positions.device)
    if num_rows == 0:
        return slots
    _row_slots_kernel[(triton.cdiv(num_rows, BLOCK),)](
        positions_ptr=positions,
        seq_lens_ptr=seq_lens,
        block_tables_ptr=block_tables,
        slots_ptr=slots,
        num_rows=num_rows,
        table_stride=block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return slots
