"""Root-mean-square norm of every row; statistics in fp32, rounded once at the end.

After a product with K split over programs, the norm first adds the product's parts to the row. A launch is saved, and
the weights of the next product are requested sooner.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.codes import GROUP, LARGEST, is_native
from common.kernels.base.pdl import wait_behind_next, wait_for_predecessor
from common.kernels.elementwise.quantize import empty_codes, store_codes


@triton.jit
def _wait(PDL: tl.constexpr, AHEAD: tl.constexpr):
    if AHEAD:
        wait_behind_next(PDL)
    else:
        wait_for_predecessor(PDL)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden], rows x_stride apart; with parts, the sum is stored here
    weight_ptr,  # [hidden]
    parts_ptr,  # [SPLITS, num_tokens, hidden]
    out_ptr,  # [num_tokens, hidden], contiguous
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least HIDDEN
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr = False,  # the next kernel starts before this one waits
    scales_ptr=None,  # [groups, num_tokens] fp32, if the output is to be codes
    GROUP: tl.constexpr = 0,
    LARGEST: tl.constexpr = 0.0,
    NATIVE: tl.constexpr = False,
):
    """Grid: (num_tokens,). A program holds a row in registers."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    x_ptr += token * x_stride
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if SPLITS == 0:
        _wait(PDL, AHEAD)
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        # The predecessor wrote only the parts; the kernel that wrote the rows had ended before the predecessor began.
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        _wait(PDL, AHEAD)
        parts_ptr += token * HIDDEN
        for part in tl.static_range(SPLITS):
            part_ptr = parts_ptr + part * tl.num_programs(0).to(tl.int64) * HIDDEN
            x += tl.load(part_ptr + columns, mask=inside, other=0.0)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    y = x * scale * weight
    if scales_ptr is not None:
        rounded = y.to(x_ptr.dtype.element_ty).to(tl.float32)  # what a product of plain elements would be given
        codes_ptr = out_ptr + token * HIDDEN
        store_codes(rounded, codes_ptr, scales_ptr + token, tl.num_programs(0), HIDDEN, BLOCK, GROUP, LARGEST, NATIVE)
        return
    tl.store(out_ptr + token * HIDDEN + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,  # [num_tokens, hidden], rows may be strided
    weight: Tensor,  # [hidden]
    eps: float,
    *,
    parts: Tensor | None = None,  # [splits, num_tokens, hidden], contiguous: first added to `x` in place
    ahead: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Return the rows of `x`, normed and scaled by `weight`: `[num_tokens, hidden]`, contiguous.

    With `ahead`, the next kernel may start before the kernel before the norm has ended. It must be a product that reads
    weights meanwhile, and nothing of these two kernels (`wait_behind_next`).
    """
    assert x.ndim == 2 and x.stride(1) == 1, f"x {tuple(x.shape)} with strides {x.stride()}: contiguous columns needed"
    num_tokens, hidden = x.shape
    assert weight.shape == (hidden,) and weight.is_contiguous(), f"weight {tuple(weight.shape)}: ({hidden},) needed"
    assert parts is None or (parts.shape[1:] == x.shape and parts.is_contiguous()), "parts: contiguous, each like x"
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x_ptr=x,
        weight_ptr=weight,
        parts_ptr=x if parts is None else parts,
        out_ptr=out,
        x_stride=x.stride(0),
        eps=eps,
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=0 if parts is None else parts.shape[0],
        PDL=pdl,
        AHEAD=ahead,
        launch_pdl=pdl,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def quantized_rms_norm(
    x: Tensor,  # [num_tokens, hidden], rows may be strided
    weight: Tensor,  # [hidden]
    eps: float,
    dtype: torch.dtype,  # of the codes
    *,
    is_grouped: bool = False,
    parts: Tensor | None = None,  # [splits, num_tokens, hidden], contiguous: first added to `x` in place
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the result of `rms_norm`, rounded to the dtype of `x`, as `quantize` does.

    The next kernel is a product of codes, which may start before the kernel before the norm has ended.
    """
    assert x.ndim == 2 and x.stride(1) == 1, f"x {tuple(x.shape)} with strides {x.stride()}: contiguous columns needed"
    num_tokens, hidden = x.shape
    assert weight.shape == (hidden,) and weight.is_contiguous(), f"weight {tuple(weight.shape)}: ({hidden},) needed"
    assert parts is None or (parts.shape[1:] == x.shape and parts.is_contiguous()), "parts: contiguous, each like x"
    codes, scales = empty_codes(num_tokens, hidden, dtype, x.device, is_grouped=is_grouped)
    if num_tokens == 0:
        return codes, scales.t()
    block = max(triton.next_power_of_2(hidden), GROUP if is_grouped else 1)
    _rms_norm_kernel[(num_tokens,)](
        x_ptr=x,
        weight_ptr=weight,
        parts_ptr=x if parts is None else parts,
        out_ptr=codes.view(torch.uint8) if dtype == torch.float8_e4m3fn else codes,
        x_stride=x.stride(0),
        eps=eps,
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=0 if parts is None else parts.shape[0],
        PDL=pdl,
        AHEAD=True,
        launch_pdl=pdl,
        scales_ptr=scales,
        GROUP=GROUP if is_grouped else 0,
        LARGEST=LARGEST[dtype],
        NATIVE=is_native(x.device),
        num_warps=min(max(block // 512, 1), 16),
    )
    return codes, scales.t()
