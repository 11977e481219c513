"""Values of MXFP4 weights in registers: the law is `common.ops.reference.mxfp4`.

Weights are read as numbers of 16 bits, with four values each. The first values of all numbers are a tile, as are the
second, third and fourth. A product takes the four tiles one after another, because it may add columns in any order.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
"""Values with a scale in common, along a row; `common.base.mxfp4` says so to rooms above the kernels."""
SMALLEST_INVERSE = tl.constexpr(2.0**126)
"""1 over the smallest normal fp32 number; 0.5 is subnormal there."""
SHIFT = tl.constexpr(16)
"""Values in bfloat16 are 2 ** -SHIFT of what they stand for, so that scales from 18 to 144 are exact."""

# Two numbers, with values at bits 0, 4, 8 and 12 of both halves. In bfloat16 the sign of a value belongs to bit 15, and
# its rest to bits 6 to 8, where it stands for 2 ** -126 of the value: a product with 2 ** 6 + 2 ** 12 brings both.
_TWO_NUMBERS = tl.constexpr(
    """{
    .reg .b32 part, later, zeros;
    mov.b32 zeros, 0x80008000;
    shr.u32 later, $4, 8;
    and.b32 part, $4, 0x000F000F;
    mul.lo.u32 part, part, 0x1040;
    and.b32 part, part, 0x81C081C0;
    fma.rn.bf16x2 $0, part, $5, zeros;
    and.b32 part, $4, 0x00F000F0;
    mul.lo.u32 part, part, 0x0104;
    and.b32 part, part, 0x81C081C0;
    fma.rn.bf16x2 $1, part, $5, zeros;
    and.b32 part, later, 0x000F000F;
    mul.lo.u32 part, part, 0x1040;
    and.b32 part, part, 0x81C081C0;
    fma.rn.bf16x2 $2, part, $5, zeros;
    and.b32 part, later, 0x00F000F0;
    mul.lo.u32 part, part, 0x0104;
    and.b32 part, part, 0x81C081C0;
    fma.rn.bf16x2 $3, part, $5, zeros;
    }"""
)


@triton.jit
def mxfp4_factors(scales, dtype: tl.constexpr):
    """Return the factors of scales: fp32; for bfloat16 the factor twice in 32 bits, from bits to the shifted value."""
    exponents = scales.to(tl.uint32)
    if dtype == tl.bfloat16:
        factors = (exponents + (126 - SHIFT)) * 0x00800080
    else:
        factors = (exponents << 23).to(tl.float32, bitcast=True)
    return factors


@triton.jit
def mxfp4_values(packed, factors, dtype: tl.constexpr):
    """Return the first, second, third and fourth values of a tile `[.., columns]` of numbers of 16 bits.

    Exact, because values have two significant bits. `factors` are `[.., columns / 8]`. Values in bfloat16 are
    shifted: see `shifted_back`.
    """
    each = tl.broadcast_to(tl.expand_dims(factors, -1), factors.shape + (GROUP // 4,))
    each = tl.reshape(each, packed.shape)
    if dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            _TWO_NUMBERS,
            "=r,=r,=r,=r,r,r,r",  # the factors of two numbers are the same
            [packed, each],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b = _value(packed, each, dtype), _value(packed >> 4, each, dtype)
        c, d = _value(packed >> 8, each, dtype), _value(packed >> 12, each, dtype)
    return a, b, c, d


@triton.jit
def shifted_back(x, dtype: tl.constexpr):
    """Return what a tile of values in `dtype`, or of sums of their products, stands for."""
    return x * (2.0**SHIFT) if dtype == tl.bfloat16 else x


@triton.jit
def _value(packed, factors, dtype: tl.constexpr):
    """Return the value of the lowest four bits: at their places in an fp32 number, they stand for 2 ** -126 of it."""
    bits = ((packed & 7).to(tl.uint32) << 22) | ((packed & 8).to(tl.uint32) << 28)
    return (bits.to(tl.float32, bitcast=True) * SMALLEST_INVERSE * factors).to(dtype)
