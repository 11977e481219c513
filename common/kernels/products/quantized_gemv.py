"""Product of a token and a weight matrix in codes of 8 bits, with neighbours fused in as `gemv` has them.

Codes are widened to fp32, and the token stays as it is. Scales of rows are applied to finished sums, scales of groups
to the token. As in `gemv`, the first tiles of weights are on the way before the wait for the predecessor.

A thread loads 16 codes of a row at once, but only 8 numbers of the token. So a tile is taken apart into halves of 8
columns, which a thread has of both. Otherwise numbers of the token would change threads before each product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_ending
from common.kernels.base.codes import GROUP as GROUP_COLUMNS
from common.kernels.base.codes import LARGEST, check_scales, widened
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor

COLUMNS = 512  # of a tile, for each warp and step of `unroll`: 16 a thread
GROUP = tl.constexpr(GROUP_COLUMNS)


@triton.jit
def _load_tile(
    tile_ptr, inside_n, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr
):
    """Load the tile INDEX of codes `[ROWS, BLOCK_K]`, without a mask if whole; read once, so evicted first."""
    tile_ptr += INDEX * BLOCK_K
    if (INDEX + 1) * BLOCK_K <= K and EVEN_N:
        tile = tl.load(tile_ptr, eviction_policy="evict_first")
    else:
        inside = inside_n & (columns < K - INDEX * BLOCK_K)[None, :]
        tile = tl.load(tile_ptr, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


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
def _load_half(row_ptr, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the numbers of a vector beside half of the tile INDEX: `[BLOCK_K / 2]` fp32."""
    if (INDEX + 1) * BLOCK_K <= K:
        half = tl.load(row_ptr + INDEX * BLOCK_K + columns)
    else:
        half = tl.load(row_ptr + INDEX * BLOCK_K + columns, mask=columns < K - INDEX * BLOCK_K, other=0.0)
    return half.to(tl.float32)


@triton.jit
def _load_scales(scales_ptr, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the scale of each column of half of the tile INDEX."""
    inside = columns < K - INDEX * BLOCK_K
    return tl.load(scales_ptr + INDEX * (BLOCK_K // GROUP) + columns // GROUP, mask=inside, other=0.0)


@triton.jit
def _halves(tile, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the even and the odd eights of the columns of a tile, each `[ROWS, BLOCK_K / 2]` fp32."""
    eights = tl.permute(tl.reshape(tile, (ROWS, BLOCK_K // 16, 2, 8)), (0, 1, 3, 2))
    even, odd = tl.split(eights)
    even, odd = tl.reshape(even, (ROWS, BLOCK_K // 2)), tl.reshape(odd, (ROWS, BLOCK_K // 2))
    return widened(even), widened(odd)


@triton.jit
def _quantized_gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [n, K] codes, contiguous; [2 * n, K] if GATED: gate, then up
    scales_ptr,  # [n], or [cdiv(n, GROUP), cdiv(K, GROUP)] if GROUPED; twice the rows if GATED
    norm_ptr,  # [K], if HAS_NORM
    residual_ptr,  # [n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [n]
    eps,
    n,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # outputs of a program; all in a group if GROUPED
    BLOCK_K: tl.constexpr,  # a multiple of COLUMNS a warp
    STAGES: tl.constexpr,  # tiles on the way at once; at most the number of tiles
    EVEN_N: tl.constexpr,  # ROWS divides n
    GROUPED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, ROWS),). A program computes ROWS outputs, over the whole of K."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)
    places = tl.arange(0, BLOCK_K // 2)
    even = places // 8 * 16 + places % 8
    odd = even + 8
    tile_ptr = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    up_ptr = tile_ptr + n.to(tl.int64) * K
    inside_n = (rows < n)[:, None]
    weights = _load_tiles(tile_ptr, inside_n, columns, K, BLOCK_K, STAGES, EVEN_N)
    if GATED:
        up_weights = _load_tiles(up_ptr, inside_n, columns, K, BLOCK_K, STAGES, EVEN_N)
    wait_for_predecessor(PDL)

    acc = tl.zeros((ROWS, BLOCK_K // 2), tl.float32)
    up_acc = tl.zeros((ROWS, BLOCK_K // 2), tl.float32)
    squares = tl.zeros((BLOCK_K // 2,), tl.float32)
    for i in tl.static_range(TILES):
        if i + STAGES < TILES:
            weights = weights + (_load_tile(tile_ptr, inside_n, columns, i + STAGES, K, BLOCK_K, EVEN_N),)
            if GATED:
                up_weights = up_weights + (_load_tile(up_ptr, inside_n, columns, i + STAGES, K, BLOCK_K, EVEN_N),)
        x = _load_half(x_ptr, even, i, K, BLOCK_K)
        other_x = _load_half(x_ptr, odd, i, K, BLOCK_K)
        if HAS_NORM:
            squares += x * x + other_x * other_x
            x *= _load_half(norm_ptr, even, i, K, BLOCK_K)
            other_x *= _load_half(norm_ptr, odd, i, K, BLOCK_K)
        up_x, other_up_x = x, other_x
        if GROUPED:
            if GATED:
                group_ptr = scales_ptr + (n + row) // GROUP * GROUPS
                up_x = x * _load_scales(group_ptr, even, i, K, BLOCK_K)
                other_up_x = other_x * _load_scales(group_ptr, odd, i, K, BLOCK_K)
            group_ptr = scales_ptr + row // GROUP * GROUPS
            x *= _load_scales(group_ptr, even, i, K, BLOCK_K)
            other_x *= _load_scales(group_ptr, odd, i, K, BLOCK_K)
        half, other = _halves(weights[i], ROWS, BLOCK_K)
        acc += half * x[None, :]
        acc += other * other_x[None, :]
        if GATED:
            half, other = _halves(up_weights[i], ROWS, BLOCK_K)
            up_acc += half * up_x[None, :]
            up_acc += other * other_up_x[None, :]

    y = tl.sum(acc, axis=1)
    up = tl.sum(up_acc, axis=1)
    if not GROUPED:
        y *= tl.load(scales_ptr + rows, mask=rows < n, other=0.0)
        if GATED:
            up *= tl.load(scales_ptr + n + rows, mask=rows < n, other=0.0)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
        up *= scale
    if GATED:
        y = gated(y, up, ACTIVATION)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < n)


def quantized_gemv(
    x: Tensor,  # [1, k], contiguous
    weight: Tensor,  # [n, k] int8, e4m3, or e4m3 as uint8; [2 * n, k] with an activation
    scales: Tensor,  # fp32 [n, 1], or of groups of GROUP columns and rows; twice the rows with an activation
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
    pdl: bool = False,
) -> Tensor:
    """Write `norm(x) @ weight.T`, then `+ bias + residual` or `activation(gate) * up`, to `out`; return `out`.

    A program has `rows` outputs and `warps` warps. A tile has, for each thread, `unroll` times 16 columns of each row.
    `stages` tiles are on the way at once, the first during the wait for the predecessor.
    """
    n, k = weight.shape[0] // (1 if activation is None else 2), weight.shape[1]
    assert x.shape == (1, k) and x.is_contiguous(), f"x {tuple(x.shape)}: [1, {k}] needed"
    assert out.shape == (1, n) and out.is_contiguous(), f"out {tuple(out.shape)}: [1, {n}] needed"
    assert weight.is_contiguous() and weight.dtype in (*LARGEST, torch.uint8), f"weight {weight.dtype}: codes needed"
    assert norm is None or norm.shape == (k,), f"norm weight: [{k}] needed"
    assert residual is None or residual.shape == (1, n), f"residual: [1, {n}] needed"
    check_ending(n, bias, activation)
    is_grouped, scale_rows = check_scales(None, weight, scales)
    is_whole = scale_rows % rows == 0 and scale_rows > 1 and (activation is None or n % scale_rows == 0)
    assert not is_grouped or is_whole, f"{rows} rows of a program, {n} outputs: groups of {GROUP_COLUMNS} rows needed"
    block_k = COLUMNS * warps * unroll
    _quantized_gemv_kernel[(triton.cdiv(n, rows),)](
        x_ptr=x,
        weight_ptr=weight,
        scales_ptr=scales,
        norm_ptr=x if norm is None else norm,
        residual_ptr=x if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        eps=eps,
        n=n,
        K=k,
        ROWS=rows,
        BLOCK_K=block_k,
        STAGES=min(stages, triton.cdiv(k, block_k)),
        EVEN_N=n % rows == 0,
        GROUPED=is_grouped,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
