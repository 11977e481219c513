"""Instructions of a warp that multiply a block of packed codes and 8 tokens on the matrix unit.

A thread has 16 bytes of a row in four words. They are its part of 8 `mma`s of 4 bits, or of 4 of 8, each with 16 rows,
16 columns and 8 tokens. Codes become numbers as the lowest bits of a power of two: 128 in bfloat16, or
1,024 in fp16.

A word holds four pairs of 4 bits, 4 bits apart, and a pair takes a shift and one more instruction. What is too much is
subtracted from sums of groups, because it is a factor of the group's sum of inputs. Of several tokens, the matrix unit
finds that sum by products with ones.

A word of signed bytes becomes two pairs of their numbers, exactly. bfloat16 has no place for 8 bits beside the power of
two. There 7 bits are added to 128, and the sign to another 128; the difference is the code.
"""

import struct
from functools import cache

PAIRS = {4: 4, 8: 2}  # of codes in a word, by their bits
WORDS = 4  # of a thread
STEPS = {4: 2, 8: 1}  # products of a word
THIRTIES = {4: 4, 8: 2}  # groups of 32 columns in a block, of which tokens have four registers each
ONE = {"bf16": 0x3F803F80, "f16": 0x3C003C00}  # twice
POWER = {"bf16": 0x43004300, "f16": 0x64006400}  # twice; the lowest bit is 1
EXCESS = {"bf16": 128.0, "f16": 1024.0}  # of codes of 4 bits in pairs
ZEROS = "{zero, zero, zero, zero}"


@cache
def word_of_bytes(dtype: str) -> str:
    """Return instructions that turn a word into two pairs of signed codes of 8 bits, exactly."""
    if dtype == "bf16":
        lines = [".reg .b32 part, sign, word, minus;", "mov.b32 minus, 0xBF80BF80;"]
        for pair, word in enumerate(("$2", "word")):
            lines += [f"shr.u32 word, $2, {8 * pair};"] if pair else []
            lines += [f"lop3.b32 part, {word}, 0x007F007F, {POWER[dtype]:#x}, 0xEA;"]
            lines += [f"lop3.b32 sign, {word}, 0x00800080, {POWER[dtype]:#x}, 0xEA;"]
            lines += [f"fma.rn.bf16x2 ${pair}, sign, minus, part;"]
    else:  # 128 more than a code, added to 1,024
        lines = [".reg .b32 part, plus, one, less;", f"mov.b32 one, {ONE[dtype]:#x};", "mov.b32 less, 0xE480E480;"]
        lines += ["xor.b32 plus, $2, 0x80808080;"]
        for pair in range(PAIRS[8]):
            lines += [f"shr.u32 plus, plus, {8 * pair};"] if pair else []
            lines += [f"lop3.b32 part, plus, 0x00FF00FF, {POWER[dtype]:#x}, 0xEA;"]
            lines += [f"fma.rn.f16x2 ${pair}, part, one, less;"]
    return "\n".join(("{", *lines, "}"))


@cache
def widening(dtype: str, bits: int) -> str:
    """Return instructions that turn a word into pairs of codes, those of 4 bits too large by a power of two."""
    if bits == 8:
        return word_of_bytes(dtype)
    lines = [".reg .b32 part;"]
    for pair in range(PAIRS[bits]):
        lines += [f"shr.u32 part, $4, {4 * pair};"] if pair else []
        lines += [f"lop3.b32 ${pair}, {'part' if pair else '$4'}, 0x000F000F, {POWER[dtype]:#x}, 0xEA;"]
    return "\n".join(("{", *lines, "}"))


def _mma(dtype: str, total: str, a: tuple[str, ...], b: tuple[str, ...], start: str) -> str:
    head = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    return f"{head} {total}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {start};"


def _registers(first: int, count: int = 4) -> list[str]:
    return [f"${first + i}" for i in range(count)]


def _tokens(first: int, step: int) -> tuple[str, str]:
    """Return a thread's two registers of tokens for a step of a block; operands begin with `first`."""
    return f"${first + 2 * step}", f"${first + 2 * step + 1}"


@cache
def summing(dtype: str, bits: int, sums: int) -> str:
    """Return instructions for sums of tokens over a block, or over the columns of each word, in as many outputs."""
    first, steps = 4 * sums, STEPS[bits]
    lines = [".reg .b32 one;", ".reg .f32 zero;", f"mov.b32 one, {ONE[dtype]:#x};", "mov.f32 zero, 0f00000000;"]
    for word in range(WORDS):
        total = "{" + ", ".join(_registers(4 * (word % sums))) + "}"
        for step in range(steps):
            start = ZEROS if step == 0 and (word == 0 or sums > 1) else total
            lines.append(_mma(dtype, total, ("one",) * 4, _tokens(first, steps * word + step), start))
    return "\n".join(("{", *lines, "}"))


@cache
def multiplying(dtype: str, bits: int, sums: int, excess: float, *, has_offsets: bool, is_lone: bool) -> str:
    """Return instructions that add scaled sums of a block, or of each of its four words, to results.

    Operands have four registers each. The first are results, pairs of codes of 8 rows and of 8 more, and tokens, 32
    columns of them each. If there is an excess or an offset, sums of tokens follow. Results before, scales of 8 rows
    and of 8 more, and offsets alike are behind them. Register `i` of scales is of the word `i`. A lone token's results
    are the first and the third.
    """
    steps, upper, lower = STEPS[bits], 4, 4 + 4 * PAIRS[bits]
    x = lower + 4 * PAIRS[bits]
    x_sums = x + 4 * THIRTIES[bits]
    before = x_sums + (4 * sums if excess or has_offsets else 0)
    scales, offsets = before + 4, before + 12
    results = (0, 2) if is_lone else (0, 1, 2, 3)
    lines = [".reg .f32 zero, p<4>, q<4>;", "mov.f32 zero, 0f00000000;"]
    lines += [f"mov.f32 ${i}, ${before + i};" for i in range(4)]
    for word in range(WORDS):
        part = "q" if sums == 1 and word >= 2 else "p"  # two chains are done sooner than one
        total = "{" + ", ".join(f"{part}{i}" for i in range(4)) + "}"
        for step in range(steps):  # 16 columns, two pairs of the word
            a = tuple(f"${side + 4 * pair + word}" for pair in (2 * step, 2 * step + 1) for side in (upper, lower))
            start = ZEROS if step == 0 and (sums > 1 or word % 2 == 0) else total
            lines.append(_mma(dtype, total, a, _tokens(x, steps * word + step), start))
        if sums > 1 or word == WORDS - 1:
            at = word if sums > 1 else 0
            for i in results:
                x_sum, side = f"${x_sums + 4 * at + i}", 4 * (i // 2) + at
                lines += [f"add.f32 p{i}, p{i}, q{i};"] if sums == 1 else []
                lines += [f"fma.rn.f32 p{i}, {x_sum}, {float_of(-excess)}, p{i};"] if excess else []
                lines += [f"fma.rn.f32 ${i}, p{i}, ${scales + side}, ${i};"]
                lines += [f"fma.rn.f32 ${i}, {x_sum}, ${offsets + side}, ${i};"] if has_offsets else []
    return "\n".join(("{", *lines, "}"))


@cache
def adding(dtype: str, bits: int) -> tuple[str, str]:
    """Return instructions that add products of a block's elements to results, and their constraints.

    Operands are those of `multiplying` without sums of tokens, scales and offsets.
    """
    steps, upper, lower = STEPS[bits], 4, 4 + 4 * PAIRS[bits]
    x = lower + 4 * PAIRS[bits]
    before, total = x + 4 * THIRTIES[bits], "{" + ", ".join(_registers(0)) + "}"
    lines: list[str] = []
    for word in range(WORDS):
        for step in range(steps):
            a = tuple(f"${side + 4 * pair + word}" for pair in (2 * step, 2 * step + 1) for side in (upper, lower))
            start = total if lines else "{" + ", ".join(_registers(before)) + "}"
            lines.append(_mma(dtype, total, a, _tokens(x, steps * word + step), start))
    each = ["=&f"] * 4 + ["r"] * (before - 4) + ["f"] * 4
    return "\n".join(("{", *lines, "}")), ",".join(each)


@cache
def operands(bits: int, sums: int, *, has_sums: bool, has_offsets: bool) -> tuple[str, str]:
    """Return the constraints of what `summing` and `multiplying` return."""
    fours = (sums if has_sums else 0) + 1 + (4 if has_offsets else 2)
    of_sums = ["=f"] * (4 * sums) + ["r"] * (4 * THIRTIES[bits])
    of_products = ["=&f"] * 4 + ["r"] * (4 * (2 * PAIRS[bits] + THIRTIES[bits])) + ["f"] * (4 * fours)
    return ",".join(of_sums), ",".join(of_products)


def float_of(number: float) -> str:
    return f"0f{struct.pack('>f', number).hex()}"
