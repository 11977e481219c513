"""Codes of e2m1 as elements in 16 bits, exactly, in registers: the law is `common.ops.base.floats`.

A code's three bits of magnitude become the lowest two of an exponent and the highest of a mantissa. At these places
they stand for `2 ** -14` of the code in fp16, and for `2 ** -126` in bfloat16. A product moves the sign and these bits
at once, because the sign is a code's lowest bit. A scale of 8 bits becomes `2 ** 7` of itself in fp16, and `2 ** 119`
in bfloat16. Both products are `2 ** -7` of an element, which has six significant bits at most. So 16 bits hold it. A
row's factor brings back the power of two.

A number beside a word has the scales of its two groups of 16 columns. The lower byte is for pairs 0 and 1.
"""

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.products.tiles.packed_mma import PAIRS

SHIFTED_BACK = gl.constexpr(128.0)
"""Sums of products of elements are this much smaller."""
MOVES = {"f16": (0x8100, 0x0810), "bf16": (0x8020, 0x0802)}
"""Factors that bring a code's bits to their place, from the lowest four bits of a half, and from the next."""
PLACES = {"f16": 0x8E008E00, "bf16": 0x81C081C0}
"""Bits of two codes at their places."""
WIDE_SCALE = {"f16": (0x00800080, 0), "bf16": (0x00100010, 0x70007000)}
"""Factor of a scale, and what is added, for its number in both halves."""


@cache
def floating(dtype: str, numbers: int = 1) -> tuple[str, str]:
    """Return instructions that turn a word into pairs of elements, divided by SHIFTED_BACK, and their constraints.

    Behind the word, each of the `numbers` that it consists of brings both scales.
    """
    word, pairs = PAIRS[4], range(PAIRS[4])
    (each, more), scales = WIDE_SCALE[dtype], ("first", "second")
    lines = [".reg .b32 part, later, first, second, zeros;", "mov.b32 zeros, 0x80008000;"]
    lines += [f"and.b32 first, ${word + 1}, 0xFF;", f"shr.u32 second, ${word + 1}, 8;"]
    lines += [f"mad.lo.u32 {scale}, {scale}, {each:#x}, {more:#x};" for scale in scales]
    lines += [f"shr.u32 later, ${word}, 8;"]
    for pair in pairs:
        lines += [f"and.b32 part, {'later' if pair > 1 else f'${word}'}, {0x000F000F << 4 * (pair % 2):#x};"]
        lines += [f"mul.lo.u32 part, part, {MOVES[dtype][pair % 2]:#x};", f"and.b32 part, part, {PLACES[dtype]:#x};"]
        lines += [f"fma.rn.{dtype}x2 ${pair}, part, {scales[pair // 2]}, zeros;"]
    constraints = ["=&r"] * len(pairs) + ["r"] * (1 + numbers)
    return "\n".join(("{", *lines, "}")), ",".join(constraints)


@gluon.jit
def beside_words(numbers):
    """Return what instructions take beside words: scales in fp32, or the numbers with scales of e2m1 in 32 bits."""
    return numbers.to(gl.int32 if numbers.dtype == gl.uint16 else gl.float32)


@gluon.jit
def factors_of_rows(factors_ptr, rows, inside):
    """Load factors of rows, and with them what elements are divided by: `[rows, 1]`."""
    return gl.load(factors_ptr + rows, mask=inside, other=0.0)[:, None] * SHIFTED_BACK
