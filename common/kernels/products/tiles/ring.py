"""Ring of tiles in shared memory, filled by the tensor memory accelerator: shared by products of a few tokens.

A slot holds a tile of weights, or one of gate and one of up, and a tile of tokens. The slot's barrier counts the bytes
of all of them. Weights are on the way before the input exists, tokens after it does.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64  # of a tile of weights: multiplied at once by the four warps of a program
WARPS = 4
MAX_TOKENS = 64
DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.int16: gl.int16,
}


def tokens_of_tile(num_tokens: int) -> int:
    """Return the width of a tile that holds all tokens: a power of two, at least 8."""
    return max(8, 1 << (num_tokens - 1).bit_length())


def describe(matrix: Tensor, tile: list[int]) -> TensorDescriptor:
    """Return a descriptor of tiles `[rows, columns]` of a contiguous matrix."""
    layout = gl.NVMMASharedLayout.get_default_for(tile, DTYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, tile, layout)


@gluon.jit
def make_ring(
    x_desc,
    weight_desc,
    STAGES: gl.constexpr,
    SIDES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Return slots of weights `[STAGES * SIDES]`, slots of tokens `[STAGES]`, and a ready barrier for each slot."""
    ring = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * SIDES, ROWS, BLOCK_K], weight_desc.layout)
    token_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    fence_async_shared()
    return ring, token_ring, arrived


@gluon.jit
def load_weight(weight_desc, ring, arrived, slot, row, n, start, TILE_BYTES: gl.constexpr, SIDES: gl.constexpr):
    """Begin loading a slot's weights; its barrier awaits TILE_BYTES, those of the tokens among them."""
    barrier = arrived.index(slot)
    mbarrier.expect(barrier, TILE_BYTES)
    tma.async_copy_global_to_shared(weight_desc, [row, start], barrier, ring.index(slot * SIDES))
    if SIDES == 2:
        tma.async_copy_global_to_shared(weight_desc, [n + row, start], barrier, ring.index(slot * SIDES + 1))
