"""Product of a few tokens and a weight matrix, with weights on the way before the input exists.

Every program has a ring of tiles in shared memory, filled by the tensor memory accelerator. The ring is filled with
weights before the wait for the predecessor, so the memory never pauses between two kernels. The tokens' tiles follow
after the wait. A tile's barrier counts the bytes of both. The product itself (`wgmma`, weights as the tall operand)
costs nothing beside the reading.

Written in Gluon, Triton's lower layer, because in Gluon a copy can begin in one place and be awaited in another. Hopper
only, two bytes an element; Triton's interpreter does not run Gluon.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from common.kernels.base.checks import check_ending, check_product
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.tiles.ending import store_product
from common.kernels.products.tiles.ring import MAX_TOKENS, ROWS, WARPS, describe, load_weight, make_ring, tokens_of_tile


@gluon.jit(do_not_specialize=["m"])
def _ring_gemm_kernel(
    x_desc,  # [m, k], tiles of BLOCK_M x BLOCK_K
    weight_desc,  # [n, k], tiles of ROWS x BLOCK_K; [2 * n, k] if GATED: gate, then up
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    m,
    n,
    TILES: gl.constexpr,  # of a part of K
    STAGES: gl.constexpr,  # slots of the ring; at most TILES
    BLOCK_M: gl.constexpr,  # at least m
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: (cdiv(n, ROWS), SPLITS). A program computes ROWS outputs of all tokens, over a part of K."""
    SIDES: gl.constexpr = 2 if GATED else 1
    TILE_BYTES: gl.constexpr = (ROWS * SIDES + BLOCK_M) * BLOCK_K * 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    row = gl.program_id(0) * ROWS
    begin = gl.program_id(1) * (TILES * BLOCK_K)
    ring, token_ring, arrived = make_ring(x_desc, weight_desc, STAGES, SIDES, ROWS, BLOCK_M, BLOCK_K)
    for slot in gl.static_range(STAGES):
        load_weight(weight_desc, ring, arrived, slot, row, n, begin + slot * BLOCK_K, TILE_BYTES, SIDES)
    wait_for_predecessor(PDL)
    for slot in gl.static_range(STAGES):
        start = begin + slot * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [0, start], arrived.index(slot), token_ring.index(slot))

    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    up_acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    slot = 0
    phase = 0
    for tile in range(TILES):
        mbarrier.wait(arrived.index(slot), phase)
        x = token_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(ring.index(slot * SIDES), x, acc, is_async=True)
        if GATED:
            up_acc = warpgroup_mma(ring.index(slot * SIDES + 1), x, up_acc, is_async=True)
            acc, up_acc = warpgroup_mma_wait(0, deps=[acc, up_acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if tile + STAGES < TILES:
            start = begin + (tile + STAGES) * BLOCK_K
            load_weight(weight_desc, ring, arrived, slot, row, n, start, TILE_BYTES, SIDES)
            tma.async_copy_global_to_shared(x_desc, [0, start], arrived.index(slot), token_ring.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    inside_n = rows < n
    inside = inside_n[:, None] & (tokens < m)[None, :]
    elements = tokens[None, :] * n + rows[:, None]
    store_product(
        acc, up_acc, bias_ptr, residual_ptr, out_ptr, rows, inside_n, elements, inside, m * n, SPLITS, HAS_RESIDUAL,
        GATED, ACTIVATION,
    )  # fmt: skip


def ring_gemm(
    x: Tensor,  # [m, k], contiguous, m up to MAX_TOKENS
    weight: Tensor,  # [n, k], or [2 * n, k] with an activation
    out: Tensor,  # [m, n], or fp32 parts [splits, m, n]; overwritten
    *,
    block_k: int,
    stages: int,
    splits: int = 1,
    residual: Tensor | None = None,  # [m, n], without splits only; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    pdl: bool = False,
) -> Tensor:
    """Write `x @ weight.T + bias`, then `+ residual` or `activation(gate) * up`, to `out`; return `out`.

    With `splits`, write parts, the first with the bias.

    `k` is a multiple of `splits * block_k`.
    """
    m, k = x.shape
    n = weight.shape[0] // (1 if activation is None else 2)
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    assert x.element_size() == 2 and weight.dtype == x.dtype, f"x {x.dtype}, weight {weight.dtype}: 16 bits, alike"
    assert k % (splits * block_k) == 0, f"{k} columns: a multiple of {splits} x {block_k} needed"
    check_product(x, weight, out, residual, splits=splits, gated=activation is not None)
    check_ending(n, bias, activation)
    block_m = tokens_of_tile(m)
    tiles = k // (splits * block_k)
    _ring_gemm_kernel[(-(-n // ROWS), splits)](
        describe(x, [block_m, block_k]),
        describe(weight, [ROWS, block_k]),
        out if residual is None else residual,
        bias,
        out,
        m,
        n,
        TILES=tiles,
        STAGES=min(stages, tiles),
        BLOCK_M=block_m,
        ROWS=ROWS,
        BLOCK_K=block_k,
        SPLITS=splits,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return out
