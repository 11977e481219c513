"""Codes of 4 bits as the tall operand of `wgmma`, in registers.

A thread has 16 bytes of each of its two rows of a block: what it holds of the operand of eight products. A pair of
codes becomes two numbers by a shift and two more instructions. One sets the lowest bits of 128 in bfloat16, or of 1,024
in fp16, the other subtracts what is too much.
"""

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAIRS = 4  # of codes in a word
POWER = {"bf16": 0x43004300, "f16": 0x64006400}  # twice; the lowest bit is 1
ONE = {"bf16": 0x3F803F80, "f16": 0x3C003C00}  # twice
LESS = {  # what a code is too large by, without and with offsets; negative, twice
    ("bf16", 8): 0xC308C308,
    ("bf16", 0): 0xC300C300,
    ("f16", 8): 0xE408E408,
    ("f16", 0): 0xE400E400,
}
CONSTRAINTS = ",".join(["=r"] * PAIRS + ["r"])
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@cache
def widening(dtype: str, middle: int) -> str:
    """Return instructions that turn a word into four pairs of codes, less `middle`."""
    lines = [".reg .b32 part, one, less;", f"mov.b32 one, {ONE[dtype]:#x};"]
    lines += [f"mov.b32 less, {LESS[dtype, middle]:#x};"]
    for pair in range(PAIRS):
        lines += [f"shr.u32 part, $4, {4 * pair};"] if pair else []
        lines += [f"lop3.b32 part, {'part' if pair else '$4'}, 0x000F000F, {POWER[dtype]:#x}, 0xEA;"]
        lines += [f"fma.rn.{dtype}x2 ${pair}, part, one, less;"]
    return "\n".join(("{", *lines, "}"))


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


@gluon.jit
def widened(numbers, dtype: gl.constexpr, WIDEN: gl.constexpr, CONSTRAINTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a block's codes `[64, 128]` as an operand; every thread has its elements."""
    if dtype == gl.bfloat16:
        of_bf16: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
        v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, [numbers], dtype=of_bf16, is_pure=True, pack=2)
    else:
        of_f16: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
        v = gl.inline_asm_elementwise(WIDEN, CONSTRAINTS, [numbers], dtype=of_f16, is_pure=True, pack=2)
    codes = gl.join(gl.join(v[0], v[1]), gl.join(v[2], v[3]))
    codes = gl.permute(gl.reshape(codes, [64, 4, 4, 2, 2, 2]), [0, 2, 5, 4, 1, 3])  # pair, group, second, 8, 16
    return gl.convert_layout(gl.reshape(codes, [64, 128]), LAYOUT)


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
def prefetch(ptrs):
    """Ask for the lines of pointers, to be in the cache of the GPU."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1)
