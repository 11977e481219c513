"""Codes of 4 bits in registers: the order in memory is that of `common.ops.base.quarters`.

A number of 16 bits holds a code of each quarter of a block of 128 columns. So the four codes of all numbers are four
tiles of neighbouring columns. Columns of a tile have a scale in common, because groups are of 32 columns or more.

Codes become 16 bits as the lowest bits of a power of two: 128 in bfloat16, or 1,024 in fp16. Scales and offsets stay
out of the products. A group's offset is a factor of its sum of inputs, which the matrix unit finds by products with
ones.
"""

import struct

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Columns of a block, with as many numbers as a quarter has columns."""
QUARTER = tl.constexpr(32)
MIDDLE = tl.constexpr(8.0)
"""Subtracted from codes without offsets."""


def _twice(kind: str, number: float) -> str:
    """Return a number in 16 bits, twice in a word; bfloat16 is the upper half of fp32."""
    half = struct.pack(">e", number) if kind == "f16" else struct.pack(">f", number)[:2]
    return f"0x{(half + half).hex()}"


def _four_pairs(kind: str, power: float, middle: float) -> str:
    """Return instructions that make the codes of a word of two numbers, a pair for each quarter.

    Args:
        power: of two, whose lowest bit in 16 bits stands for 1.
        middle: subtracted from codes.
    """
    lines = [".reg .b32 part, one, less;", f"mov.b32 one, {_twice(kind, 1.0)};"]
    lines += [f"mov.b32 less, {_twice(kind, -power - middle)};"]
    for quarter in range(4):
        lines += [f"shr.u32 part, $4, {4 * quarter};"]
        lines += [f"lop3.b32 part, part, 0x000F000F, {_twice(kind, power)}, 0xEA;"]
        lines += [f"fma.rn.{kind}x2 ${quarter}, part, one, less;"]
    return "\n".join(("{", *lines, "}"))


_BF16 = tl.constexpr(_four_pairs("bf16", 128.0, 0.0))
_F16 = tl.constexpr(_four_pairs("f16", 1024.0, 0.0))
_SIGNED_BF16 = tl.constexpr(_four_pairs("bf16", 128.0, 8.0))
_SIGNED_F16 = tl.constexpr(_four_pairs("f16", 1024.0, 8.0))


@triton.jit
def int4_factors(scale_ptr, offset_ptr, blocks, inside, BLOCKS: tl.constexpr, GROUPS: tl.constexpr):
    """Load the factors of a block of rows in fp32: a tuple of scales, then of offsets, if there are some.

    There is one of each for groups of a block or more, two for its halves, four for its quarters.

    Args:
        scale_ptr: the first scale of each row; `offset_ptr` alike, or None.
        blocks: number of the block, of each split; past the last of BLOCKS, factors are 0.
        inside: rows of the matrix.
    """
    PARTS: tl.constexpr = (GROUPS + BLOCKS - 1) // BLOCKS
    scales, offsets = (), ()
    inside = inside & (blocks < BLOCKS)
    for part in tl.static_range(PARTS):
        groups = blocks * GROUPS // BLOCKS + part
        scales = scales + (tl.load(scale_ptr + groups, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        if offset_ptr is not None:
            offset = tl.load(offset_ptr + groups, mask=inside, other=0.0)
            offsets = offsets + (offset.to(tl.float32),)  # type: ignore[assignment]
    return scales + offsets


@triton.jit
def int4_codes(packed, IS_SIGNED: tl.constexpr, dtype: tl.constexpr):
    """Return tiles of the codes of a block's quarters in `dtype`, exactly: 0 to 15, or -8 to 7."""
    if dtype == tl.bfloat16:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _SIGNED_BF16 if IS_SIGNED else _BF16,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif dtype == tl.float16:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _SIGNED_F16 if IS_SIGNED else _F16,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        middle = MIDDLE if IS_SIGNED else 0.0
        first, second = (packed & 15).to(dtype) - middle, ((packed >> 4) & 15).to(dtype) - middle
        third, fourth = ((packed >> 8) & 15).to(dtype) - middle, ((packed >> 12) & 15).to(dtype) - middle
    return first, second, third, fourth


@triton.jit
def int4_multiply(codes, factors, x, x_sums, acc, IS_SIGNED: tl.constexpr):
    """Add the product of the quarters of a block and of tokens to `acc`, group by group.

    Args:
        x_sums: as by `int4_sums`; () for signed codes.
    """
    PARTS: tl.constexpr = len(factors) if IS_SIGNED else len(factors) // 2
    EACH: tl.constexpr = 4 // PARTS
    for part in tl.static_range(PARTS):
        acc += _dots(codes, x, part * EACH, EACH) * factors[part]
        if not IS_SIGNED:
            acc += x_sums[part] * factors[PARTS + part]
    return acc


@triton.jit
def int4_sums(x, factors, shape: tl.constexpr, dtype: tl.constexpr):
    """Return the sums of tokens over each group of a block, in the shape of sums of products.

    Args:
        shape: of a quarter of the block.
    """
    PARTS: tl.constexpr = len(factors) // 2
    EACH: tl.constexpr = 4 // PARTS
    ones = tl.full(shape, 1.0, dtype)
    sums = ()
    for part in tl.static_range(PARTS):
        sums = sums + (_dots((ones, ones, ones, ones), x, part * EACH, EACH),)  # type: ignore[assignment]
    return sums


@triton.jit
def _dots(quarters, x, FIRST: tl.constexpr, EACH: tl.constexpr):
    """Return the sum of the products of EACH quarters from FIRST on."""
    sums = tl.dot(quarters[FIRST], x[FIRST], input_precision="ieee")
    for i in tl.static_range(FIRST + 1, FIRST + EACH):
        sums = tl.dot(quarters[i], x[i], sums, input_precision="ieee")
    return sums
