"""Product of a few tokens and a weight matrix, both in codes of 8 bits, by a ring of tiles.

As `ring_gemm`, with weights on the way before the input exists, half the bytes to read, and no conversion. `wgmma`
multiplies e4m3 by e4m3 and signed bytes by signed bytes. The matrix unit keeps few bits of sums of e4m3. So sums of
GROUP columns begin at zero, and are added up in fp32. That is also where scales of groups are applied. Scales of
rows are applied at the end.

Written in Gluon, as `ring_gemm` is. Hopper only; Triton's interpreter does not run Gluon.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from common.kernels.base.checks import check_codes, check_ending
from common.kernels.base.codes import GROUP, check_scales
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.tiles.ending import store_product
from common.kernels.products.tiles.ring import MAX_TOKENS, ROWS, WARPS, describe, load_weight, make_ring, tokens_of_tile


@gluon.jit
def _tile_sums(weights, x, zero):
    """Begin the product of a tile of weights and one of tokens; e4m3 is added up in fp32 every 128 columns."""
    if weights.dtype == gl.int8:
        sums = warpgroup_mma(weights, x, zero, use_acc=False, is_async=True)
    else:
        sums = warpgroup_mma(weights, x, zero, use_acc=False, max_num_imprecise_acc=128, is_async=True)
    return sums


@gluon.jit
def _row_scales(scales_ptr, rows, inside_n, group, GROUPS: gl.constexpr, SCALE_ROWS: gl.constexpr):
    return gl.load(scales_ptr + rows // SCALE_ROWS * GROUPS + group, mask=inside_n, other=0.0)


@gluon.jit(do_not_specialize=["m"])
def _quantized_ring_kernel(
    x_desc,  # [m, k] codes, tiles of BLOCK_M x BLOCK_K
    x_scales_ptr,  # [groups, m] fp32; without GROUPED [m]
    weight_desc,  # [n, k] codes, tiles of ROWS x BLOCK_K; [2 * n, k] if GATED: gate, then up
    scales_ptr,  # [n], or [cdiv(n, SCALE_ROWS), groups] if GROUPED; twice the rows if GATED
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    m,
    n,
    TILES: gl.constexpr,  # of a part of K
    STAGES: gl.constexpr,  # slots of the ring; at most TILES
    BLOCK_M: gl.constexpr,  # at least m
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,  # 128 if GROUPED
    SPLITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: (cdiv(n, ROWS), SPLITS). A program computes ROWS outputs of all tokens, over a part of K."""
    SIDES: gl.constexpr = 2 if GATED else 1
    TILE_BYTES: gl.constexpr = (ROWS * SIDES + BLOCK_M) * BLOCK_K
    GROUPS: gl.constexpr = TILES * SPLITS
    sums_dtype: gl.constexpr = gl.int32 if weight_desc.dtype == gl.int8 else gl.float32
    acc_dtype: gl.constexpr = gl.float32 if GROUPED else sums_dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 32]
    )
    row = gl.program_id(0) * ROWS
    first = gl.program_id(1) * TILES
    ring, token_ring, arrived = make_ring(x_desc, weight_desc, STAGES, SIDES, ROWS, BLOCK_M, BLOCK_K)
    for slot in gl.static_range(STAGES):
        load_weight(weight_desc, ring, arrived, slot, row, n, (first + slot) * BLOCK_K, TILE_BYTES, SIDES)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    inside_n = rows < n
    inside_m = tokens < m
    wait_for_predecessor(PDL)
    for slot in gl.static_range(STAGES):
        start = (first + slot) * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [0, start], arrived.index(slot), token_ring.index(slot))

    zero = gl.zeros([ROWS, BLOCK_M], sums_dtype, layout)
    acc = gl.zeros([ROWS, BLOCK_M], acc_dtype, layout)
    up_acc = gl.zeros([ROWS, BLOCK_M], acc_dtype, layout)
    slot = 0
    phase = 0
    for tile in range(TILES):
        if GROUPED:  # on the way while the tile arrives
            x_scales = gl.load(x_scales_ptr + (first + tile) * m + tokens, mask=inside_m, other=0.0)
            scales = _row_scales(scales_ptr, rows, inside_n, first + tile, GROUPS, SCALE_ROWS)
            if GATED:
                up_scales = _row_scales(scales_ptr, n + rows, inside_n, first + tile, GROUPS, SCALE_ROWS)
        mbarrier.wait(arrived.index(slot), phase)
        x = token_ring.index(slot).permute((1, 0))
        sums = _tile_sums(ring.index(slot * SIDES), x, zero)
        if GATED:
            up_sums = _tile_sums(ring.index(slot * SIDES + 1), x, zero)
            sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        if tile + STAGES < TILES:
            start = (first + tile + STAGES) * BLOCK_K
            load_weight(weight_desc, ring, arrived, slot, row, n, start, TILE_BYTES, SIDES)
            tma.async_copy_global_to_shared(x_desc, [0, start], arrived.index(slot), token_ring.index(slot))
        if GROUPED:
            acc += sums.to(gl.float32) * (scales[:, None] * x_scales[None, :])
            if GATED:
                up_acc += up_sums.to(gl.float32) * (up_scales[:, None] * x_scales[None, :])
        else:
            acc += sums
            if GATED:
                up_acc += up_sums
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    y = acc.to(gl.float32)
    up = up_acc.to(gl.float32)
    if not GROUPED:
        x_scales = gl.load(x_scales_ptr + tokens, mask=inside_m, other=0.0)
        y *= gl.load(scales_ptr + rows, mask=inside_n, other=0.0)[:, None] * x_scales[None, :]
        if GATED:
            up *= gl.load(scales_ptr + n + rows, mask=inside_n, other=0.0)[:, None] * x_scales[None, :]
    elements = tokens[None, :] * n + rows[:, None]
    inside = inside_n[:, None] & inside_m[None, :]
    store_product(
        y, up, bias_ptr, residual_ptr, out_ptr, rows, inside_n, elements, inside, m * n, SPLITS, HAS_RESIDUAL, GATED,
        ACTIVATION,
    )  # fmt: skip


def quantized_ring(
    x: Tensor,  # [m, k] codes, contiguous, m up to MAX_TOKENS
    x_scales: Tensor,  # fp32 [m, 1] or [m, groups], with contiguous columns
    weight: Tensor,  # [n, k] codes of the same dtype, or [2 * n, k] with an activation
    scales: Tensor,  # fp32 of rows or of groups, as x_scales has them
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

    `k` is a multiple of `splits * block_k`, and `block_k` a multiple of GROUP; with scales of groups it is GROUP.
    """
    (m, k), n = x.shape, weight.shape[0] // (1 if activation is None else 2)
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    check_codes(x, weight, out, residual, splits=splits, gated=activation is not None)
    check_ending(n, bias, activation)
    is_grouped, scale_rows = check_scales(x_scales, weight, scales)
    assert k % (splits * block_k) == 0, f"{k} columns: a multiple of {splits} x {block_k} needed"
    assert block_k == GROUP or (block_k % GROUP == 0 and not is_grouped), f"tiles of {block_k} columns: {GROUP} needed"
    block_m = tokens_of_tile(m)
    tiles = k // (splits * block_k)
    _quantized_ring_kernel[(-(-n // ROWS), splits)](
        describe(x, [block_m, block_k]),
        x_scales.t(),
        describe(weight, [ROWS, block_k]),
        scales,
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
        GROUPED=is_grouped,
        SCALE_ROWS=scale_rows,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return out
