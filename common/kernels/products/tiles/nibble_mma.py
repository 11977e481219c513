"""Instructions of a warp that multiply a block of codes of 4 bits and 8 tokens on the matrix unit.

A thread has 16 bytes of a row: what it holds of 8 `mma`s with 16 rows, 16 columns and 8 tokens, in four words. A word
holds four pairs of codes, 4 bits apart. A pair becomes two numbers by a shift and one more instruction. It sets the
lowest bits of 128 in bfloat16, or of 1,024 in fp16. What is too much is subtracted from sums of groups, because it is a
factor of the group's sum of inputs. Of several tokens, the matrix unit finds that sum by products with ones.
"""

import struct
from functools import cache

PAIRS = 4  # of codes in a word, and words of a thread
GROUPS = 4  # of 32 columns in a block
ONE = {"bf16": 0x3F803F80, "f16": 0x3C003C00}  # twice
POWER = {"bf16": 0x43004300, "f16": 0x64006400}  # twice; the lowest bit is 1
ZEROS = "{zero, zero, zero, zero}"


@cache
def widening(dtype: str) -> str:
    """Return instructions that turn a word into four pairs of codes, too large by a power of two."""
    lines = [".reg .b32 part;"]
    for pair in range(PAIRS):
        lines += [f"shr.u32 part, $4, {4 * pair};"] if pair else []
        lines += [f"lop3.b32 ${pair}, {'part' if pair else '$4'}, 0x000F000F, {POWER[dtype]:#x}, 0xEA;"]
    return "\n".join(("{", *lines, "}"))


def _mma(dtype: str, total: str, a: tuple[str, ...], b: tuple[str, ...], start: str) -> str:
    head = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    return f"{head} {total}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {start};"


def _registers(first: int, count: int = 4) -> list[str]:
    return [f"${first + i}" for i in range(count)]


def _tokens(first: int, group: int, step: int) -> tuple[str, str]:
    """Return a thread's two registers of tokens for a step of a group; operands begin with `first`."""
    return f"${first + 4 * group + 2 * step}", f"${first + 4 * group + 2 * step + 1}"


@cache
def summing(dtype: str, sums: int) -> str:
    """Return instructions for sums of tokens over a block, or over each of its four groups, in as many outputs."""
    first = 4 * sums
    lines = [".reg .b32 one;", ".reg .f32 zero;", f"mov.b32 one, {ONE[dtype]:#x};", "mov.f32 zero, 0f00000000;"]
    for group in range(GROUPS):
        total = "{" + ", ".join(_registers(4 * (group % sums))) + "}"
        for step in range(2):
            start = ZEROS if step == 0 and (group == 0 or sums > 1) else total
            lines.append(_mma(dtype, total, ("one",) * 4, _tokens(first, group, step), start))
    return "\n".join(("{", *lines, "}"))


@cache
def multiplying(dtype: str, sums: int, excess: float, *, has_offsets: bool, is_lone: bool) -> str:
    """Return instructions that add scaled sums of a block, or of each of its four groups, to results.

    Operands have four registers each. The first are results, pairs of codes of 8 rows and of 8 more, and tokens of
    four groups. Sums of tokens, results before, scales of 8 rows and of 8 more, and offsets alike follow. Register `i`
    of scales is of the group `i`. A lone token's results are the first and the third.
    """
    upper, lower, x = 4, 20, 36
    x_sums = x + 4 * GROUPS
    before = x_sums + 4 * sums
    scales, offsets = before + 4, before + 12
    results = (0, 2) if is_lone else (0, 1, 2, 3)
    lines = [".reg .f32 zero, p<4>, q<4>;", "mov.f32 zero, 0f00000000;"]
    lines += [f"mov.f32 ${i}, ${before + i};" for i in range(4)]
    for group in range(GROUPS):
        part = "q" if sums == 1 and group >= 2 else "p"  # two chains are done sooner than one
        total = "{" + ", ".join(f"{part}{i}" for i in range(4)) + "}"
        for step in range(2):  # a group is a word, and a step of 16 columns two of its pairs
            a = tuple(f"${side + 4 * pair + group}" for pair in (2 * step, 2 * step + 1) for side in (upper, lower))
            start = ZEROS if step == 0 and (sums > 1 or group % 2 == 0) else total
            lines.append(_mma(dtype, total, a, _tokens(x, group, step), start))
        if sums > 1 or group == GROUPS - 1:
            at = group if sums > 1 else 0
            for i in results:
                x_sum, side = f"${x_sums + 4 * at + i}", 4 * (i // 2) + at
                lines += [f"add.f32 p{i}, p{i}, q{i};"] if sums == 1 else []
                lines += [f"fma.rn.f32 p{i}, {x_sum}, {_float(-excess)}, p{i};"]
                lines += [f"fma.rn.f32 ${i}, p{i}, ${scales + side}, ${i};"]
                lines += [f"fma.rn.f32 ${i}, {x_sum}, ${offsets + side}, ${i};"] if has_offsets else []
    return "\n".join(("{", *lines, "}"))


@cache
def operands(sums: int, *, has_offsets: bool) -> tuple[str, str]:
    """Return the constraints of what `summing` and `multiplying` return."""
    fours = sums + 1 + (4 if has_offsets else 2)
    of_sums = ["=f"] * (4 * sums) + ["r"] * (4 * GROUPS)
    of_products = ["=&f"] * 4 + ["r"] * (8 * PAIRS + 4 * GROUPS) + ["f"] * (4 * fours)
    return ",".join(of_sums), ",".join(of_products)


def _float(number: float) -> str:
    return f"0f{struct.pack('>f', number).hex()}"
