"""Tiles of e4m3 numbers as operands of `wgmma` in registers, in float16. Gluon, Hopper only.

So no converted tile is stored. A thread of `wgmma` holds numbers far apart in a tile, but loads neighbours fastest. So
head dimensions are multiplied in another order: those of keys in the order of `queries_in_order`, those of values in
the order of `dims_of_rows`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.base.e4m3 import widened


@gluon.constexpr_function
def run_of(head_dim):
    """Return how many neighbours in a key a thread loads: all banks of shared memory then serve eight threads."""
    return 16 if head_dim == 64 else 32


@gluon.constexpr_function
def _key_layout(tile, head_dim):
    run = run_of(head_dim)
    registers = [[0, 1 << i] for i in range(run.bit_length() - 1)] + [[8, 0]]
    registers += [[0, 128]] if head_dim == 256 else []
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [tile, head_dim])


@gluon.constexpr_function
def _value_layout(tile, head_dim):
    run = head_dim // 32  # neighbours in a value that a thread loads
    dims, token = [[0, 1 << i] for i in range(run.bit_length() - 1)], [[1, 0]]
    registers = [*token, *dims] if run == 2 else [*dims, *token]  # as `_paired` takes them
    registers += [[1 << i, 0] for i in range(3, tile.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * run], [0, 16 * run]], [], [tile, head_dim])


@gluon.jit
def queries_in_order(low, high):
    """Return whole queries `[rows, HEAD_DIM]` of their halves, with dimensions in the order of `keys_operand`."""
    ROWS: gl.constexpr = low.shape[0]
    HEAD_DIM: gl.constexpr = 2 * low.shape[1]
    RUN: gl.constexpr = run_of(HEAD_DIM)
    q = gl.join(low, high).permute((0, 2, 1)).reshape((ROWS, HEAD_DIM // (4 * RUN), 4, RUN // 2, 2))
    return q.permute((0, 1, 3, 2, 4)).reshape((ROWS, HEAD_DIM))


@gluon.jit
def keys_operand(tile, mma: gl.constexpr):
    """Load a tile of keys `[TILE, HEAD_DIM]` as the left operand, with dimensions as in `queries_in_order`."""
    TILE: gl.constexpr = tile.shape[0]
    HEAD_DIM: gl.constexpr = tile.shape[1]
    RUN: gl.constexpr = run_of(HEAD_DIM)
    keys = widened(tile.load(_key_layout(TILE, HEAD_DIM)), gl.float16)
    keys = keys.reshape((TILE, HEAD_DIM // (4 * RUN), 4, RUN // 2, 2)).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(keys.reshape((TILE, HEAD_DIM)), gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def values_operand(tile, begin, end, mma: gl.constexpr):
    """Load a tile of values as the left operand `[HEAD_DIM, TILE]`, with rows as in `dims_of_rows`.

    Tokens before `begin` and from `end` on give zeros.
    """
    TILE: gl.constexpr = tile.shape[0]
    HEAD_DIM: gl.constexpr = tile.shape[1]
    values = _paired(tile)
    if (begin > 0) | (end < TILE):
        tokens = gl.arange(0, TILE, gl.SliceLayout(0, values.type.layout))
        values = gl.where(((tokens >= begin) & (tokens < end))[None, :], values, gl.zeros_like(values))
    values = values.reshape((4, 8, HEAD_DIM // 64, 2, TILE)).permute((2, 0, 3, 1, 4))
    return gl.convert_layout(values.reshape((HEAD_DIM, TILE)), gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def _paired(tile):
    """Load a tile of values as float16 `[HEAD_DIM, TILE]`; a register has two tokens of a dimension.

    So bytes change places before they are converted. Where a thread loads four neighbours, an instruction moves four
    bytes; Triton takes three instructions for two.
    """
    TILE: gl.constexpr = tile.shape[0]
    HEAD_DIM: gl.constexpr = tile.shape[1]
    values = tile.load(_value_layout(TILE, HEAD_DIM))
    if HEAD_DIM == 64:
        values = widened(values, gl.float16).permute((1, 0))
    else:
        even, odd = gl.split(values.reshape((TILE // 2, 2, HEAD_DIM)).permute((0, 2, 1)))
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            .reg .b16 a0, a1, b0, b1;
            prmt.b32 a, $4, $5, 0x5140;
            prmt.b32 b, $4, $5, 0x7362;
            mov.b32 {a0, a1}, a;
            mov.b32 {b0, b1}, b;
            cvt.rn.f16x2.e4m3x2 $0, a0;
            cvt.rn.f16x2.e4m3x2 $1, a1;
            cvt.rn.f16x2.e4m3x2 $2, b0;
            cvt.rn.f16x2.e4m3x2 $3, b1;
            }""",
            "=r,=r,=r,=r,r,r", [even, odd], (gl.float16, gl.float16), True, 4,
        )  # fmt: skip
        pairs = gl.join(low, high).reshape((TILE // 2, HEAD_DIM // 4, 2, 2, 2))  # dimension of a pair, token, pair
        values = pairs.permute((1, 4, 2, 0, 3)).reshape((HEAD_DIM, TILE))
    return values


@gluon.jit
def dims_of_rows(HEAD_DIM: gl.constexpr, layout: gl.constexpr, CACHE: gl.constexpr):
    """Return the head dimension of each row of a sum of values, from a cache of type `CACHE`."""
    rows = gl.arange(0, HEAD_DIM, layout)
    if CACHE.is_fp8():
        REPEATS: gl.constexpr = HEAD_DIM // 64  # of the rows of a `wgmma`: 16 of each warp
        lane = rows // 16 % 4 * 8 + rows % 8
        rows = (lane * REPEATS + rows // 64) * 2 + rows // 8 % 2
    return rows
