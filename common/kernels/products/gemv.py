"""Product of a token and a weight matrix, at the speed of reading the matrix, with neighbours fused in.

Before the product: RMSNorm of the input. The norm's scale is a common factor, applied to the finished sums, so the row
is read once. After the product: the residual is added, with a bias if there is one, or gate and up are joined by
the activation.

The first tiles of weights are loaded before the wait for the predecessor. So at the start of a kernel the memory is
busy with weights, not idle until the input is ready. From then on, each tile used makes room for another tile on the
way. The source states these loads explicitly, because the compiler's distance of loads ahead changes from version to
version. Programs of one warp with all rows on the way do best, because no warp waits for another.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_ending
from common.kernels.base.codes import GROUP as GROUP_COLUMNS
from common.kernels.base.codes import check_scales, widened
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor

GROUP = tl.constexpr(GROUP_COLUMNS)


@triton.jit
def _load_tile(
    tile_ptr, inside_n, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr
):
    """Load the tile INDEX of weights `[ROWS, BLOCK_K]`, without a mask if whole; read once, so evicted first."""
    if (INDEX + 1) * BLOCK_K <= K:
        if EVEN_N:
            return tl.load(tile_ptr + INDEX * BLOCK_K, eviction_policy="evict_first")
        return tl.load(tile_ptr + INDEX * BLOCK_K, mask=inside_n, other=0.0, eviction_policy="evict_first")
    inside = inside_n & (columns < K - INDEX * BLOCK_K)[None, :]
    return tl.load(tile_ptr + INDEX * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_piece(row_ptr, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the piece `[BLOCK_K]` of a vector beside the tile INDEX."""
    if (INDEX + 1) * BLOCK_K <= K:
        return tl.load(row_ptr + INDEX * BLOCK_K + columns)
    return tl.load(row_ptr + INDEX * BLOCK_K + columns, mask=columns < K - INDEX * BLOCK_K, other=0.0)


@triton.jit
def _load_tiles(
    tile_ptr, inside_n, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, EVEN_N: tl.constexpr
):
    """Load the first COUNT tiles, as a tuple; all are on the way before the first is needed."""
    tiles = (_load_tile(tile_ptr, inside_n, columns, 0, K, BLOCK_K, EVEN_N),)
    for i in tl.static_range(1, COUNT):
        tiles = tiles + (_load_tile(tile_ptr, inside_n, columns, i, K, BLOCK_K, EVEN_N),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _load_pieces(row_ptr, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr):
    """Load the first COUNT pieces of a vector, as a tuple."""
    pieces = (_load_piece(row_ptr, columns, 0, K, BLOCK_K),)
    for i in tl.static_range(1, COUNT):
        pieces = pieces + (_load_piece(row_ptr, columns, i, K, BLOCK_K),)  # type: ignore[assignment]
    return pieces


@triton.jit
def _group_scales(scales_ptr, row, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the scale of each column of the tile INDEX, in the group of rows that `row` is of."""
    groups_ptr = scales_ptr + row // GROUP * ((K + GROUP - 1) // GROUP) + INDEX * (BLOCK_K // GROUP)
    return tl.load(groups_ptr + columns // GROUP, mask=columns < K - INDEX * BLOCK_K, other=0.0)


@triton.jit
def _gemv_kernel(
    x_ptr,  # [k]
    weight_ptr,  # [n, k], contiguous; [2 * n, k] if GATED: gate, then up
    norm_ptr,  # [k], if HAS_NORM
    residual_ptr,  # [n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [n]
    eps,
    n,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # outputs of a program
    BLOCK_K: tl.constexpr,  # 16 bytes of weights a thread or a multiple, so a thread has the same columns of all rows
    STAGES: tl.constexpr,  # tiles on the way at once; at most the number of tiles
    EVEN_N: tl.constexpr,  # ROWS divides n
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    scales_ptr=None,  # of codes, fp32: [n], or [cdiv(n, GROUP), cdiv(K, GROUP)] if GROUPED; twice the rows if GATED
    GROUPED: tl.constexpr = False,
):
    """Grid: (cdiv(n, ROWS),). A program computes ROWS outputs, over the whole of K."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)
    tile_ptr = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    up_ptr = tile_ptr + n.to(tl.int64) * K
    inside_n = (rows < n)[:, None]
    weights = _load_tiles(tile_ptr, inside_n, columns, K, BLOCK_K, STAGES, EVEN_N)
    if GATED:
        up_weights = _load_tiles(up_ptr, inside_n, columns, K, BLOCK_K, STAGES, EVEN_N)
    if HAS_NORM:
        norms = _load_pieces(norm_ptr, columns, K, BLOCK_K, STAGES)
    wait_for_predecessor(PDL)
    inputs = _load_pieces(x_ptr, columns, K, BLOCK_K, STAGES)

    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    up_acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(TILES):
        if i + STAGES < TILES:
            weights = weights + (_load_tile(tile_ptr, inside_n, columns, i + STAGES, K, BLOCK_K, EVEN_N),)
            if GATED:
                up_weights = up_weights + (_load_tile(up_ptr, inside_n, columns, i + STAGES, K, BLOCK_K, EVEN_N),)
            inputs = inputs + (_load_piece(x_ptr, columns, i + STAGES, K, BLOCK_K),)
            if HAS_NORM:
                norms = norms + (_load_piece(norm_ptr, columns, i + STAGES, K, BLOCK_K),)
        x = inputs[i].to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= norms[i].to(tl.float32)
        up_x = x
        if GROUPED:
            up_x = x * _group_scales(scales_ptr, tl.program_id(0) * ROWS + n, columns, i, K, BLOCK_K)
            x *= _group_scales(scales_ptr, tl.program_id(0) * ROWS, columns, i, K, BLOCK_K)
        acc += widened(weights[i]) * x[None, :]
        if GATED:
            up_acc += widened(up_weights[i]) * up_x[None, :]

    HAS_ROW_SCALES: tl.constexpr = scales_ptr is not None and not GROUPED
    y = tl.sum(acc, axis=1)
    if HAS_ROW_SCALES:
        y *= tl.load(scales_ptr + rows, mask=rows < n, other=0.0)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
    if GATED:
        up = tl.sum(up_acc, axis=1) * scale
        if HAS_ROW_SCALES:
            up *= tl.load(scales_ptr + n + rows, mask=rows < n, other=0.0)
        y = gated(y, up, ACTIVATION)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < n)


def gemv(
    x: Tensor,  # [1, k], contiguous
    weight: Tensor,  # [n, k], or [2 * n, k] with an activation
    out: Tensor,  # [1, n]; overwritten
    *,
    rows: int,
    warps: int,
    unroll: int = 1,
    stages: int = 1,
    norm: Tensor | None = None,  # [k]
    eps: float = 0.0,
    residual: Tensor | None = None,  # [1, n]; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    scales: Tensor | None = None,  # of codes, fp32: [n, 1] of rows, or of groups; [2 * n, 1] with an activation
    pdl: bool = False,
) -> Tensor:
    """Write `norm(x) @ weight.T`, then `+ bias + residual` or `activation(gate) * up`, to `out`; return `out`.

    A program has `rows` outputs and `warps` warps. A tile has, for each thread, `unroll` times 16 bytes of each row.
    `stages` tiles are on the way at once, the first during the wait for the predecessor. With scales, the weight is of
    int8, of e4m3, or of e4m3 as uint8, and `x` is not quantized.
    """
    n, k = weight.shape[0] // (1 if activation is None else 2), weight.shape[1]
    assert x.shape == (1, k) and x.is_contiguous(), f"x {tuple(x.shape)}: [1, {k}] needed"
    assert out.shape == (1, n) and out.is_contiguous(), f"out {tuple(out.shape)}: [1, {n}] needed"
    assert weight.is_contiguous(), f"weight with strides {weight.stride()}: contiguous needed"
    assert (weight.dtype == x.dtype) == (scales is None), f"weight {weight.dtype}, x {x.dtype}: alike without scales"
    is_grouped = False
    if scales is not None:
        is_grouped, scale_rows = check_scales(None, weight, scales)
        is_whole = (
            scale_rows == GROUP_COLUMNS and scale_rows % rows == 0 and (activation is None or n % scale_rows == 0)
        )
        assert not is_grouped or is_whole, (
            f"{rows} rows of a program, {n} outputs: groups of {GROUP_COLUMNS} rows needed"
        )
    columns = warps * unroll * (256 if scales is None else 512)
    assert norm is None or norm.shape == (k,), f"norm weight: [{k}] needed"
    assert residual is None or residual.shape == (1, n), f"residual: [1, {n}] needed"
    check_ending(n, bias, activation)
    _gemv_kernel[(triton.cdiv(n, rows),)](
        x_ptr=x,
        weight_ptr=weight,
        norm_ptr=x if norm is None else norm,
        residual_ptr=x if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        eps=eps,
        n=n,
        K=k,
        ROWS=rows,
        BLOCK_K=columns,
        STAGES=min(stages, triton.cdiv(k, columns)),
        EVEN_N=n % rows == 0,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        scales_ptr=scales,
        GROUPED=is_grouped,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
