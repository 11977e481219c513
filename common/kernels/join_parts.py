"""Adds up what the programs of a split product left: fp32 sums over stretches of K.

They are added in order, so that the result does not depend on timing.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import wait_for_predecessor

COLUMNS = 512  # of a program


@triton.jit
def _join_parts_kernel(
    parts_ptr,  # [SPLITS, num_elements] fp32, or [SPLITS, 2, num_elements] if GATED
    residual_ptr,  # [num_elements], if HAS_RESIDUAL; may be out_ptr
    out_ptr,  # [num_elements]
    num_elements,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(num_elements, BLOCK),)."""
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < num_elements
    stride = num_elements * (2 if GATED else 1)
    wait_for_predecessor(PDL)
    acc = tl.zeros((BLOCK,), tl.float32)
    up_acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + part * stride + elements, mask=inside, other=0.0)
        if GATED:
            up_acc += tl.load(parts_ptr + part * stride + num_elements + elements, mask=inside, other=0.0)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + elements, acc.to(out_ptr.dtype.element_ty), mask=inside)


def join_parts(
    parts: Tensor,  # [splits, num_tokens, n] fp32, or [splits, 2, num_tokens, n] if gated; contiguous
    out: Tensor,  # [num_tokens, n]; overwritten
    *,
    residual: Tensor | None = None,  # [num_tokens, n]; may be `out`
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """The sum of the parts, then `+ residual` or `silu(gate) * up`; returns `out`."""
    assert parts.shape[-2:] == out.shape and parts.is_contiguous(), f"parts {tuple(parts.shape)}, out differs"
    assert parts.ndim == (4 if gated else 3), f"parts {tuple(parts.shape)}: of gate and up if gated, else of one"
    assert residual is None or residual.shape == out.shape, f"residual: {tuple(out.shape)} needed"
    _join_parts_kernel[(triton.cdiv(out.numel(), COLUMNS),)](
        parts_ptr=parts,
        residual_ptr=parts if residual is None else residual,
        out_ptr=out,
        num_elements=out.numel(),
        SPLITS=parts.shape[0],
        BLOCK=COLUMNS,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
