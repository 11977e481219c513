"""Packed codes of 4 or 8 bits as the tall operand of `wgmma`, in registers.

A thread has 16 bytes of each of its two rows of a block of 64 bytes. They are its part of the operand of eight
products of 4 bits, or of four of 8. A pair of 4 bits becomes two numbers by a shift and two more instructions. One sets
the lowest bits of 128 in bfloat16, or of 1,024 in fp16, the other subtracts what is too much. Words of 8 bits become
numbers as in `packed_mma`.

Or codes become elements at once, in fp32, and are rounded to 16 bits. A choice of bytes adds a byte to a power of two.
Codes of 4 bits are added to 128, those of 8 bits plus 128 to 32,768. One more instruction multiplies by the scale,
subtracts, and adds the offset. So an element is off by half a unit of its last place. `2 ** -24` of the offset, and of
that power of two times the scale, comes on top.
"""

from functools import cache
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.products.tiles.packed_floats import beside_words
from common.kernels.products.tiles.packed_mma import ONE, PAIRS, POWER, float_of, word_of_bytes

MIDDLE = 8
"""Subtracted from codes of 4 bits without offsets."""
LESS = {  # what a code of 4 bits is too large by, without and with offsets; negative, twice
    ("bf16", 8): 0xC308C308,
    ("bf16", 0): 0xC300C300,
    ("f16", 8): 0xE408E408,
    ("f16", 0): 0xE400E400,
}


class Place(NamedTuple):
    """Place of a byte in the significand of a number of fp32."""

    zero: int  # bytes of the number beside it
    first: int  # choice of bytes for the lowest byte of a word
    step: int  # from a byte's choice to that of the next
    excess: int  # number of a byte that stands for zero

    def choice(self, byte: int) -> int:
        return self.first + self.step * byte


PLACES = {4: Place(0x43000000, 0x7044, 0x100, 128), 8: Place(0x47000000, 0x7404, 0x10, 32_768 + 128)}


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
def scaling(dtype: str, bits: int, *, has_offsets: bool, numbers: int = 2) -> str:
    """Return instructions that turn a word into pairs of elements, which are rounded from fp32.

    Behind the word, each of the `numbers` that it consists of brings the scale, and then the offset if there is one.
    Codes of 4 bits without offsets are less `MIDDLE`.
    """
    word, place = PAIRS[bits], PLACES[bits]
    scale, offset = f"${word + 1}", f"${word + 1 + numbers}"
    excess = float_of(-place.excess - (MIDDLE if bits == 4 and not has_offsets else 0))
    lines = [".reg .b32 first, second, low, high;", ".reg .f32 less;"]
    if bits == 4:  # bytes of every second code
        lines += [f"and.b32 first, ${word}, 0x0F0F0F0F;", f"shr.u32 second, ${word}, 4;"]
        lines += ["and.b32 second, second, 0x0F0F0F0F;"]
    else:
        lines += [f"xor.b32 first, ${word}, 0x80808080;"]
    less = f"fma.rn.f32 less, {scale}, {excess}, {offset};" if has_offsets else f"mul.rn.f32 less, {scale}, {excess};"
    lines.append(less)
    for pair in range(PAIRS[bits]):
        source, byte = ("first", pair) if bits == 8 else (("first", "second")[pair % 2], pair // 2)
        for name, choice in (("low", place.choice(byte)), ("high", place.choice(byte + 2))):
            lines += [f"prmt.b32 {name}, {source}, {place.zero:#x}, {choice:#x};"]
            lines += [f"fma.rn.f32 {name}, {name}, {scale}, less;"]
        lines += [f"cvt.rn.{dtype}x2.f32 ${pair}, high, low;"]
    return "\n".join(("{", *lines, "}"))


@cache
def constraints(bits: int, *, has_scales: bool = False, has_offsets: bool = False, numbers: int = 2) -> str:
    """Return the constraints of what `widening` and `scaling` return."""
    beside = ["f"] * (numbers * (has_scales + has_offsets))
    return ",".join(["=r"] * PAIRS[bits] + ["r"] + beside)


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
def words_layout(groups: int) -> gl.DistributedLinearLayout:
    """Return the layout of the same numbers as `[64, chunk, group, word, second]`; words of a group share a scale."""
    within = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0]][: (4 // groups).bit_length() - 1]
    of_groups = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]][: groups.bit_length() - 1]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], *within, *of_groups, [8, 0, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        block_bases=[],
        shape=[64, 4, groups, 4 // groups, 2],
    )


@gluon.jit
def _widened(numbers, beside, dtype: gl.constexpr, BITS: gl.constexpr, WIDEN: gl.constexpr, CONSTRAINTS: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    """Return a block's codes `[64, 128]`, or `[64, 64]` of 8 bits, as an operand; every thread has its elements.

    `beside` has scales and offsets `[64, 32]`, if codes are scaled.
    """
    operands = (numbers,) + beside
    if BITS == 4:
        if dtype == gl.bfloat16:
            of_bf16: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
            v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, operands, dtype=of_bf16, is_pure=True, pack=2)
        else:
            of_f16: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
            v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, operands, dtype=of_f16, is_pure=True, pack=2)
        codes = gl.join(gl.join(v[0], v[1]), gl.join(v[2], v[3]))
        codes = gl.permute(gl.reshape(codes, [64, 4, 4, 2, 2, 2]), [0, 2, 5, 4, 1, 3])  # pair, group, second, 8, 16
        codes = gl.reshape(codes, [64, 128])
    else:
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
    """Lay a number of each group `[64, groups]` out beside both numbers of its words, in 32 bits: `[64, 32]`."""
    GROUPS: gl.constexpr = numbers.shape[1]
    wide = beside_words(numbers)
    each = gl.expand_dims(gl.expand_dims(gl.expand_dims(wide, 1), 3), 4)
    each = gl.broadcast(each, gl.zeros([64, 4, GROUPS, 4 // GROUPS, 2], wide.dtype, WORDS_LAYOUT))[0]
    return gl.convert_layout(gl.reshape(each, [64, 32]), CODES_LAYOUT)


@gluon.jit
def _joined(halves, LAYOUT: gl.constexpr):
    """Return two operands `[64, 64]` beside each other."""
    both = gl.permute(gl.join(halves[0], halves[1]), [0, 2, 1])
    return gl.convert_layout(gl.reshape(both, [64, 128]), LAYOUT)


@gluon.jit
def operand_of(ring, place, words, dtype: gl.constexpr, BITS: gl.constexpr, WIDEN: gl.constexpr,
               CONSTRAINTS: gl.constexpr, CODES_LAYOUT: gl.constexpr, WORDS_LAYOUT: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Return a block of a ring, `[ROWS, 128]`, as an operand: codes, or elements if there are scales of words.

    `words` has scales of each tile of the block, `[ROWS, groups]` each, then offsets if there are any.
    """
    TILES: gl.constexpr = BITS // 4
    tiles = ()
    for tile in gl.static_range(TILES):
        beside = ()
        for i in gl.static_range(len(words) // TILES):
            beside = beside + (_beside_words(words[TILES * i + tile], WORDS_LAYOUT, CODES_LAYOUT),)  # type: ignore[assignment]
        numbers = ring.index(place * TILES + tile).load(CODES_LAYOUT)
        some = _widened(numbers, beside, dtype, BITS, WIDEN, CONSTRAINTS, LAYOUT)
        tiles = tiles + (some,)  # type: ignore[assignment]
    return _joined(tiles, LAYOUT) if TILES == 2 else tiles[0]  # type: ignore[misc]
