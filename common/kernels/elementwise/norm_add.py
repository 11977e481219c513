"""Root-mean-square norm of a product, and its addition to the residual stream, in one pass over each row.

The product may come in parts, with K split over programs: the parts are added up first, always in the same order.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.pdl import wait_for_predecessor


@triton.jit
def _norm_add_kernel(
    parts_ptr,  # [SPLITS, num_tokens, hidden]
    weight_ptr,  # [hidden]
    scale_ptr,  # [1] fp32, if HAS_SCALE
    rows_ptr,  # [num_tokens, hidden], contiguous; overwritten
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least HIDDEN
    SPLITS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens,). A program holds a row in registers."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    elements = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    # The predecessor wrote only the product; the kernel that wrote the rows had ended before the predecessor began.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    product = tl.load(parts_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLITS):
        part_ptr = parts_ptr + part * tl.num_programs(0).to(tl.int64) * HIDDEN
        product += tl.load(part_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    row += product * tl.rsqrt(tl.sum(product * product, axis=0) / HIDDEN + eps) * weight
    if HAS_SCALE:
        row *= tl.load(scale_ptr)
    tl.store(rows_ptr + elements, row.to(rows_ptr.dtype.element_ty), mask=inside)


def norm_add(
    parts: Tensor,  # [splits, num_tokens, hidden], contiguous: their sum is normed
    weight: Tensor,  # [hidden]
    eps: float,
    rows: Tensor,  # [num_tokens, hidden], contiguous; overwritten
    *,
    scale: Tensor | None = None,  # [1] fp32
    pdl: bool = False,
) -> Tensor:
    """Write `(rows + rms_norm(sum of parts)) * scale` to `rows`; return `rows`."""
    num_tokens, hidden = rows.shape
    assert parts.ndim == 3 and parts.shape[1:] == rows.shape, f"parts {tuple(parts.shape)}: [splits, *rows] needed"
    assert parts.is_contiguous() and rows.is_contiguous(), "parts and rows: contiguous"
    assert weight.shape == (hidden,) and weight.is_contiguous(), f"weight {tuple(weight.shape)}: ({hidden},) needed"
    assert scale is None or scale.numel() == 1, f"scale {tuple(scale.shape)}: one number needed"
    if num_tokens == 0:
        return rows
    block = triton.next_power_of_2(hidden)
    _norm_add_kernel[(num_tokens,)](
        parts_ptr=parts,
        weight_ptr=weight,
        scale_ptr=weight if scale is None else scale,
        rows_ptr=rows,
        eps=eps,
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=parts.shape[0],
        HAS_SCALE=scale is not None,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return rows
