"""Sum of the parts of a product with K split over programs, where no norm follows to add the parts."""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.pdl import wait_for_predecessor

COLUMNS = 512  # elements of a program


@triton.jit
def _join_parts_kernel(
    parts_ptr,  # [SPLITS, num_elements]
    rows_ptr,  # [num_elements]
    num_elements,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(num_elements, BLOCK),)."""
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < num_elements
    wait_for_predecessor(PDL)
    acc = tl.load(rows_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + elements, mask=inside, other=0.0)
        parts_ptr += num_elements
    tl.store(rows_ptr + elements, acc.to(rows_ptr.dtype.element_ty), mask=inside)


def join_parts(
    parts: Tensor,  # [splits, num_tokens, n], contiguous
    rows: Tensor,  # [num_tokens, n], contiguous; the parts are added to it
    *,
    pdl: bool = False,
) -> Tensor:
    """Add the parts to `rows`, in place; return `rows`."""
    assert parts.shape[1:] == rows.shape, f"parts {tuple(parts.shape)}, rows {tuple(rows.shape)}: they differ"
    assert parts.is_contiguous() and rows.is_contiguous(), "parts and rows: contiguous"
    _join_parts_kernel[(triton.cdiv(rows.numel(), COLUMNS),)](
        parts_ptr=parts,
        rows_ptr=rows,
        num_elements=rows.numel(),
        SPLITS=parts.shape[0],
        BLOCK=COLUMNS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return rows
