"""Rows as codes of 8 bits with scales, in one pass over each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.codes import GROUP, LARGEST, codes_of, is_native, scale_of
from common.kernels.base.pdl import wait_behind_next


@triton.jit
def store_codes(
    y,  # [BLOCK] fp32: a row, zeros past its end
    codes_ptr,  # of the row
    scales_ptr,  # of the row's first group
    scale_stride,  # between groups
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least WIDTH, at least GROUP if that is not 0
    GROUP: tl.constexpr,  # columns that share a scale; 0: all
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize a row held by a program, and store codes and scales."""
    columns = tl.arange(0, BLOCK)
    if GROUP == 0:
        scale = scale_of(tl.max(tl.abs(y), axis=0), LARGEST)
        tl.store(scales_ptr, scale)
        codes = codes_of(y, scale, LARGEST, NATIVE)
    else:
        groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
        scales = scale_of(tl.max(tl.abs(groups), axis=1), LARGEST)
        numbers = tl.arange(0, BLOCK // GROUP)
        tl.store(scales_ptr + numbers * scale_stride, scales, mask=numbers * GROUP < WIDTH)
        codes = tl.reshape(codes_of(groups, scales[:, None], LARGEST, NATIVE), (BLOCK,))
    tl.store(codes_ptr + columns, codes, mask=columns < WIDTH)


@triton.jit
def _quantize_kernel(
    x_ptr,  # [num_rows, WIDTH], rows x_stride apart
    codes_ptr,  # [num_rows, WIDTH], contiguous
    scales_ptr,  # [groups, num_rows] fp32
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows,). A program holds a row in registers."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    wait_behind_next(PDL)  # the product behind reads weights, and nothing of the two kernels before it
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    store_codes(x, codes_ptr + row * WIDTH, scales_ptr + row, num_rows, WIDTH, BLOCK, GROUP, LARGEST, NATIVE)


def quantize(
    x: Tensor,  # [num_rows, width], rows may be strided
    dtype: torch.dtype,
    *,
    is_grouped: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return codes `[num_rows, width]`, and fp32 scales `[num_rows, 1]`, or `[num_rows, ceil(width / GROUP)]`.

    The scales of a column are contiguous.
    """
    assert x.ndim == 2 and x.stride(1) == 1, f"x {tuple(x.shape)} with strides {x.stride()}: contiguous columns needed"
    num_rows, width = x.shape
    codes, scales = empty_codes(num_rows, width, dtype, x.device, is_grouped=is_grouped)
    if num_rows == 0:
        return codes, scales.t()
    block = max(triton.next_power_of_2(width), GROUP if is_grouped else 1)
    _quantize_kernel[(num_rows,)](
        x_ptr=x,
        codes_ptr=codes.view(torch.uint8) if dtype == torch.float8_e4m3fn else codes,
        scales_ptr=scales,
        x_stride=x.stride(0),
        WIDTH=width,
        BLOCK=block,
        GROUP=GROUP if is_grouped else 0,
        LARGEST=LARGEST[dtype],
        NATIVE=is_native(x.device),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=min(max(block // 512, 1), 32),
    )
    return codes, scales.t()


def empty_codes(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device, *, is_grouped: bool
) -> tuple[Tensor, Tensor]:
    """Return memory for codes `[num_rows, width]`, and for scales `[groups, num_rows]`."""
    codes = torch.empty((num_rows, width), dtype=dtype, device=device)
    num_groups = triton.cdiv(width, GROUP) if is_grouped else 1
    return codes, torch.empty((num_groups, num_rows), dtype=torch.float32, device=device)
