"""Root-mean-square norm of every row; statistics in fp32, one rounding at the end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import wait_for_predecessor


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden], rows x_stride apart
    weight_ptr,  # [hidden]
    out_ptr,  # [num_tokens, hidden], contiguous
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least HIDDEN
    PDL: tl.constexpr,
):
    """Grid: (num_tokens,). One program a row, the row in registers."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    x = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    y = x * scale * weight
    tl.store(out_ptr + token * HIDDEN + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """`x [num_tokens, hidden]`, whose rows may be strided, normed and scaled by `weight [hidden]`: contiguous."""
    assert x.ndim == 2 and x.stride(1) == 1, f"x {tuple(x.shape)} with strides {x.stride()}: contiguous columns needed"
    num_tokens, hidden = x.shape
    assert weight.shape == (hidden,) and weight.is_contiguous(), f"weight {tuple(weight.shape)}: ({hidden},) needed"
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        x_stride=x.stride(0),
        eps=eps,
        HIDDEN=hidden,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
