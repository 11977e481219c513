"""End of a product of codes: sums times the scales of tokens and rows, with a neighbour fused in, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.gate import gated

BLOCK = 1024


@triton.jit
def _scale_sums_kernel(
    sums_ptr,  # [m, n] int32 or fp32, contiguous; [m, 2 * n] if GATED: gate, then up
    x_scales_ptr,  # [m]
    scales_ptr,  # [n]; [2 * n] if GATED
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n]
    n,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (m, cdiv(n, BLOCK)). A program takes BLOCK outputs of a token."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    x_scale = tl.load(x_scales_ptr + token)
    sums_ptr += token * n * (2 if GATED else 1)
    scale = tl.load(scales_ptr + rows, mask=inside, other=0.0)
    y = tl.load(sums_ptr + rows, mask=inside, other=0).to(tl.float32) * scale * x_scale
    if GATED:
        up_scale = tl.load(scales_ptr + n + rows, mask=inside, other=0.0)
        up = tl.load(sums_ptr + n + rows, mask=inside, other=0).to(tl.float32) * up_scale * x_scale
        y = gated(y, up, ACTIVATION)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * n + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


def scale_sums(
    sums: Tensor,  # [m, n] int32 or fp32, contiguous, or [m, 2 * n] with an activation
    x_scales: Tensor,  # fp32 [m, 1]
    scales: Tensor,  # fp32 [n, 1], or [2 * n, 1] with an activation
    out: Tensor,  # [m, n]; overwritten
    *,
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
) -> Tensor:
    """Write `sums * x_scales * scales + bias`, or `activation(gate) * up`, to `out`; return `out`."""
    m, n = out.shape
    num_rows = n if activation is None else 2 * n
    assert sums.shape == (m, num_rows) and sums.dtype in (torch.int32, torch.float32), f"sums {tuple(sums.shape)}"
    assert sums.is_contiguous() and out.is_contiguous(), "sums and out: contiguous"
    assert x_scales.shape == (m, 1) and scales.shape == (num_rows, 1), "a scale for each token and row"
    assert x_scales.is_contiguous() and scales.is_contiguous(), "scales: contiguous"
    assert bias is None or (bias.shape == (n,) and activation is None), f"bias: [{n}], without a gate"
    if m == 0:
        return out
    _scale_sums_kernel[(m, triton.cdiv(n, BLOCK))](
        sums_ptr=sums,
        x_scales_ptr=x_scales,
        scales_ptr=scales,
        bias_ptr=bias,
        out_ptr=out,
        n=n,
        GATED=activation is not None,
        ACTIVATION=activation,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
