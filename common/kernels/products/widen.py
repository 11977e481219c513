"""Elements of a matrix in packed codes of 4 or 8 bits, written in 16 bits for a product of many tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.products.packed_checks import check_packed

ROWS, WARPS = 8, 4
BLOCKS = 4  # of 64 bytes of a row, for a program
POWER = tl.constexpr(2.0**126)


@triton.jit
def _nibble(numbers, PLACE: tl.constexpr, MIDDLE: tl.constexpr):
    return ((numbers >> (4 * PLACE)) & 15).to(tl.float32) - MIDDLE


@triton.jit
def _float(numbers, PLACE: tl.constexpr):
    """Return values of e2m1 with the sign lowest: in fp32 their bits stand for 2 ** -126 of them."""
    code = (numbers >> (4 * PLACE)).to(tl.uint32)
    return (((code & 14) << 21) | ((code & 1) << 31)).to(tl.float32, bitcast=True) * POWER


@triton.jit
def _byte(numbers, PLACE: tl.constexpr):
    return ((numbers >> (8 * PLACE)) & 255).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _widen_kernel(
    weight_ptr,  # [n, K * BITS / 16] numbers of 16 bits
    scales_ptr,  # [n, K / GROUP]
    offsets_ptr,  # as scales_ptr, or None
    factors_ptr,  # [n] of rows of e2m1, or None
    out_ptr,  # [n, K]
    n,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    COLUMNS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,
):
    """Grid: (cdiv(n, ROWS), cdiv(K, COLUMNS)). A program writes ROWS x COLUMNS elements."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    eights = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    inside = (rows < n)[:, None] & (eights * 8 < K)[None, :]
    columns = eights[:, None] * 8 + tl.arange(0, 8)[None, :]
    NUMBERS: tl.constexpr = COLUMNS * BITS // 16
    numbers = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    mask = (rows < n)[:, None] & (numbers * (16 // BITS) < K)[None, :]
    packed = tl.load(weight_ptr + rows[:, None] * (K * BITS // 16) + numbers[None, :], mask=mask, other=0)
    if factors_ptr is not None:
        low = tl.join(_float(packed, 0), _float(packed, 1))
        high = tl.join(_float(packed, 2), _float(packed, 3))
    elif BITS == 4:
        MIDDLE: tl.constexpr = 8.0 if offsets_ptr is None else 0.0
        low = tl.join(_nibble(packed, 0, MIDDLE), _nibble(packed, 1, MIDDLE))
        high = tl.join(_nibble(packed, 2, MIDDLE), _nibble(packed, 3, MIDDLE))
    if BITS == 4:
        codes = tl.reshape(tl.join(low, high), (ROWS, COLUMNS // 128, 4, 4, 2, 2, 2))
        codes = tl.permute(codes, (0, 1, 3, 6, 5, 2, 4))  # from the furthest columns to the nearest
    else:
        codes = tl.reshape(tl.join(_byte(packed, 0), _byte(packed, 1)), (ROWS, COLUMNS // 64, 4, 4, 2, 2))
        codes = tl.permute(codes, (0, 1, 3, 5, 2, 4))
    codes = tl.reshape(codes, (ROWS, COLUMNS // 8, 8))
    group = rows[:, None] * (K // GROUP) + (eights * 8 // GROUP)[None, :]
    scales = tl.load(scales_ptr + group, mask=inside, other=0.0)
    if factors_ptr is not None:  # scales are bytes of five bits of exponent and three of mantissa
        wide = ((scales.to(tl.uint32) << 20) + (105 << 23)).to(tl.float32, bitcast=True)
        factors = tl.load(factors_ptr + rows, mask=rows < n, other=0.0)
        elements = codes * (wide * factors[:, None])[:, :, None]
    else:
        elements = codes * scales.to(tl.float32)[:, :, None]
    if offsets_ptr is not None:
        elements += tl.load(offsets_ptr + group, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    out = elements.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None, None] * K + columns[None, :, :], out, mask=inside[:, :, None])


def widen(
    weight: Tensor,  # packed uint8 [n, k / 2], or packed int8 [n, k]
    scales: Tensor,  # fp16 or fp32 [n, groups], or of e2m1 uint8
    offsets: Tensor | None,  # as `scales`
    factors: Tensor | None,  # fp32 [n, 1], of e2m1
    out: Tensor,  # [n, k], contiguous; overwritten
) -> Tensor:
    """Write elements, `scale * code + offset` or `code * (scale * factor)`, to `out`, rounded once; return `out`."""
    packed = check_packed(weight, scales, offsets, factors)
    n, k = weight.shape[0], packed.num_columns
    assert out.shape == (n, k) and out.is_contiguous(), f"out {tuple(out.shape)}: contiguous, [{n}, {k}] needed"
    columns = BLOCKS * packed.block
    _widen_kernel[(triton.cdiv(n, ROWS), triton.cdiv(k, columns))](
        weight_ptr=weight.view(torch.uint16),
        scales_ptr=scales,
        offsets_ptr=offsets,
        factors_ptr=factors,
        out_ptr=out,
        n=n,
        K=k,
        BITS=packed.bits,
        GROUP=packed.group,
        COLUMNS=columns,
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return out
