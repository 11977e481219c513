"""Rows of the embedding table, with which a decode step begins.

Computes as torch does, but with dependent launch: the first product loads its weights meanwhile. A scale is multiplied
on the way; its product is rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_column
from common.kernels.base.pdl import wait_for_predecessor


@triton.jit
def _embedding_kernel(
    token_ids_ptr,  # [num_tokens] int32
    table_ptr,  # [vocab, HIDDEN], contiguous
    out_ptr,  # [num_tokens, HIDDEN], contiguous
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least HIDDEN
    PDL: tl.constexpr,
):
    """Grid: (num_tokens,). A program copies a row, times `scale`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    wait_for_predecessor(PDL)
    token_id = tl.load(token_ids_ptr + token).to(tl.int64)
    row = tl.load(table_ptr + token_id * HIDDEN + columns, mask=inside).to(tl.float32) * scale
    tl.store(out_ptr + token * HIDDEN + columns, row.to(out_ptr.dtype.element_ty), mask=inside)


def embedding(
    token_ids: Tensor,  # [num_tokens] int32, each below vocab
    table: Tensor,  # [vocab, hidden]
    scale: float = 1.0,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return rows of `table`, times `scale`: `[num_tokens, hidden]`."""
    (num_tokens,), hidden = token_ids.shape, table.shape[1]
    check_column("token_ids", token_ids, num_tokens)
    assert table.is_contiguous(), f"table with strides {table.stride()}: contiguous needed"
    out = torch.empty((num_tokens, hidden), dtype=table.dtype, device=table.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _embedding_kernel[(num_tokens,)](
        token_ids_ptr=token_ids,
        table_ptr=table,
        out_ptr=out,
        scale=scale,
        HIDDEN=hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return out
