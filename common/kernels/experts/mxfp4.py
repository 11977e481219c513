"""Values of MXFP4 weights in registers: the law is `common.ops.reference.mxfp4`."""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
"""Values with a scale in common, along a row; `common.base.mxfp4` says so to rooms above the kernels."""
SMALLEST_INVERSE = tl.constexpr(2.0**126)
"""1 over the smallest normal fp32 number; 0.5 is subnormal there."""


@triton.jit
def from_mxfp4(packed, scales, dtype: tl.constexpr):
    """Return a tile's values `[rows, 2 * columns]` of bytes `[rows, columns]` and scales `[rows, columns / 16]`.

    Exact in bfloat16 and float32, because values have two significant bits. Scales of masked values must be below 255.
    """
    low, high = _value(packed & 15), _value(packed >> 4)
    values = tl.interleave(low, high)  # [rows, 2 * columns] fp32
    factors = (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    rows: tl.constexpr = packed.shape[0]
    groups: tl.constexpr = packed.shape[1] // 16
    scaled = tl.reshape(values, (rows, groups, GROUP)) * tl.expand_dims(factors, 2)
    return tl.reshape(scaled, (rows, groups * GROUP)).to(dtype)


@triton.jit
def _value(code):
    """Return the value of four bits as fp32: at their places in an fp32 number, they stand for 2 ** -126 of it."""
    bits = ((code & 7).to(tl.uint32) << 22) | ((code & 8).to(tl.uint32) << 28)
    return bits.to(tl.float32, bitcast=True) * SMALLEST_INVERSE
