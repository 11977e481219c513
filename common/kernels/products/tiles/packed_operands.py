"""Packed codes of 4 or 8 bits as the tall operand of `wgmma`, in registers.

A thread has 16 bytes of each of its two rows of a block of 64 bytes. They are its part of the operand of eight
products of 4 bits, or of four of 8. A pair of 4 bits becomes two numbers by a shift and two more instructions. One sets
the lowest bits of 128 in bfloat16, or of 1,024 in fp16, the other subtracts what is too much. Words of 8 bits become
numbers as in `packed_mma`.

Or codes of 8 bits become elements at once, in fp32, and are rounded once. There a code plus 128 is added to 32,768. One
more instruction multiplies by the scale, subtracts, and adds the offset.
"""

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.products.tiles.packed_mma import ONE, PAIRS, POWER, word_of_bytes

LESS = {  # what a code of 4 bits is too large by, without and with offsets; negative, twice
    ("bf16", 8): 0xC308C308,
    ("bf16", 0): 0xC300C300,
    ("f16", 8): 0xE408E408,
    ("f16", 0): 0xE400E400,
}


@cache
def widening(dtype: str, bits: int, middle: int) -> str:
    """Return instructions that turn a word into pairs of codes, those of 4 bits less `middle`."""
    if bits == 8:
        return word_of_bytes(dtype)
    lines = [".reg .b32 part, one, less;", f"mov.b32 one, {ONE[dtype]:#x};"]
    lines += [f"mov.b32 less, {LESS[dtype, middle]:#x};"]
    for pair in range(PAIRS[bits]):
        lines += [f"shr.u32 part, $4, {4 * pair};"] if pair else []
        lines += [f"lop3.b32 part, {'part' if pair else '$4'}, 0x000F000F, {POWER[dtype]:#x}, 0xEA;"]
        lines += [f"fma.rn.{dtype}x2 ${pair}, part, one, less;"]
    return "\n".join(("{", *lines, "}"))


@cache
def scaling(dtype: str, *, has_offsets: bool) -> str:
    """Return instructions that turn a word of 8 bits into two pairs of elements, rounded once.

    Behind the word, both numbers of it bring the scale, and then the offset if there is one.
    """
    lines = [".reg .b32 plus, low, high;", ".reg .f32 less;", "xor.b32 plus, $2, 0x80808080;"]
    lines += ["fma.rn.f32 less, $3, 0fC7008000, $5;" if has_offsets else "mul.rn.f32 less, $3, 0fC7008000;"]  # -32,896
    for pair in range(PAIRS[8]):
        for name, byte in (("low", pair), ("high", pair + 2)):
            lines += [f"prmt.b32 {name}, plus, 0x47000000, {0x7404 + 0x10 * byte:#x};"]
            lines += [f"fma.rn.f32 {name}, {name}, $3, less;"]
        lines += [f"cvt.rn.{dtype}x2.f32 ${pair}, high, low;"]
    return "\n".join(("{", *lines, "}"))


@cache
def constraints(bits: int, *, has_scales: bool = False, has_offsets: bool = False) -> str:
    """Return the constraints of what `widening` and `scaling` return."""
    numbers = ["f"] * (2 * (has_scales + has_offsets))
    return ",".join(["=r"] * PAIRS[bits] + ["r"] + numbers)


@cache
def codes_layout() -> gl.DistributedLinearLayout:
    """Return the layout of a block of 64 rows, `[64, 32]` numbers of 16 bits, in four warps."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@cache
def words_layout() -> gl.DistributedLinearLayout:
    """Return the layout of the same numbers as `[64, chunk, word, second]`, of which a word shares a scale."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4, 2],
    )


@gluon.jit
def _widened(numbers, beside, dtype: gl.constexpr, BITS: gl.constexpr, WIDEN: gl.constexpr, CONSTRAINTS: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    """Return a block's codes `[64, 128]`, or `[64, 64]` of 8 bits, as an operand; every thread has its elements.

    `beside` has scales and offsets `[64, 32]`, if codes are scaled.
    """
    if BITS == 4:
        if dtype == gl.bfloat16:
            of_bf16: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
            v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, [numbers], dtype=of_bf16, is_pure=True, pack=2)
        else:
            of_f16: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
            v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, [numbers], dtype=of_f16, is_pure=True, pack=2)
        codes = gl.join(gl.join(v[0], v[1]), gl.join(v[2], v[3]))
        codes = gl.permute(gl.reshape(codes, [64, 4, 4, 2, 2, 2]), [0, 2, 5, 4, 1, 3])  # pair, group, second, 8, 16
        codes = gl.reshape(codes, [64, 128])
    else:
        operands = (numbers,) + beside
        if dtype == gl.bfloat16:
            two_bf16: gl.constexpr = (gl.bfloat16, gl.bfloat16)
            v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, operands, dtype=two_bf16, is_pure=True, pack=2)
        else:
            two_f16: gl.constexpr = (gl.float16, gl.float16)
            v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, operands, dtype=two_f16, is_pure=True, pack=2)
        codes = gl.permute(gl.reshape(gl.join(v[0], v[1]), [64, 4, 4, 2, 2]), [0, 2, 4, 1, 3])  # pair, 16, second, 8
        codes = gl.reshape(codes, [64, 64])
    return gl.convert_layout(codes, LAYOUT)


@gluon.jit
def _beside_words(numbers, WORDS_LAYOUT: gl.constexpr, CODES_LAYOUT: gl.constexpr):
    """Lay a number of each word `[64, 4]` out beside both numbers of a block's words, in fp32: `[64, 32]`."""
    each = gl.expand_dims(gl.expand_dims(numbers.to(gl.float32), 1), 3)
    each = gl.broadcast(each, gl.zeros([64, 4, 4, 2], gl.float32, WORDS_LAYOUT))[0]
    return gl.convert_layout(gl.reshape(each, [64, 32]), CODES_LAYOUT)


@gluon.jit
def _joined(halves, LAYOUT: gl.constexpr):
    """Return two operands `[64, 64]` beside each other."""
    both = gl.permute(gl.join(halves[0], halves[1]), [0, 2, 1])
    return gl.convert_layout(gl.reshape(both, [64, 128]), LAYOUT)


@gluon.jit
def parts_of(codes, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return an operand's groups of columns, as a tuple."""
    parts = ()
    if PARTS == 1:
        parts = (codes,)  # type: ignore[assignment]
    else:
        first, second = gl.split(gl.permute(gl.reshape(codes, [64, 2, 64]), [0, 2, 1]))
        if PARTS == 2:
            parts = gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)  # type: ignore[assignment]
        else:
            a, b = gl.split(gl.permute(gl.reshape(first, [64, 2, 32]), [0, 2, 1]))
            c, d = gl.split(gl.permute(gl.reshape(second, [64, 2, 32]), [0, 2, 1]))
            parts = (
                gl.convert_layout(a, LAYOUT),
                gl.convert_layout(b, LAYOUT),
                gl.convert_layout(c, LAYOUT),
                gl.convert_layout(d, LAYOUT),
            )  # type: ignore[assignment]
    return parts


@gluon.jit
def operand_of(ring, place, words, dtype: gl.constexpr, BITS: gl.constexpr, WIDEN: gl.constexpr,
               CONSTRAINTS: gl.constexpr, CODES_LAYOUT: gl.constexpr, WORDS_LAYOUT: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Return a block of a ring, `[ROWS, 128]`, as an operand: codes, or elements if there are scales of words.

    `words` has scales of both halves of the block, `[ROWS, 4]` each, then offsets if there are any.
    """
    if BITS == 4:
        numbers = ring.index(place).load(CODES_LAYOUT)
        a = _widened(numbers, (), dtype, BITS, WIDEN, CONSTRAINTS, LAYOUT)
    else:
        halves = ()
        for half in gl.static_range(2):
            beside = ()
            for i in gl.static_range(len(words) // 2):
                beside = beside + (_beside_words(words[2 * i + half], WORDS_LAYOUT, CODES_LAYOUT),)  # type: ignore[assignment]
            numbers = ring.index(place * 2 + half).load(CODES_LAYOUT)
            some = _widened(numbers, beside, dtype, BITS, WIDEN, CONSTRAINTS, LAYOUT)
            halves = halves + (some,)  # type: ignore[assignment]
        a = _joined(halves, LAYOUT)
    return a
