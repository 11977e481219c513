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
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor


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
    BLOCK_K: tl.constexpr,  # a multiple of 256 a warp, so that a thread has the same columns of all rows
    STAGES: tl.constexpr,  # tiles on the way at once; at most the number of tiles
    EVEN_N: tl.constexpr,  # ROWS divides n
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
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
        acc += weights[i].to(tl.float32) * x[None, :]
        if GATED:
            up_acc += up_weights[i].to(tl.float32) * x[None, :]

    y = tl.sum(acc, axis=1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
    if GATED:
        y = gated(y, tl.sum(up_acc, axis=1) * scale, ACTIVATION)
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
    pdl: bool = False,
) -> Tensor:
    """Write `norm(x) @ weight.T`, then `+ bias + residual` or `activation(gate) * up`, to `out`; return `out`.

    A program has `rows` outputs and `warps` warps. A tile has, for each thread, `unroll` times 8 columns of each row.
    `stages` tiles are on the way at once, the first during the wait for the predecessor.
    """
    n, k = weight.shape[0] // (1 if activation is None else 2), weight.shape[1]
    assert x.shape == (1, k) and x.is_contiguous(), f"x {tuple(x.shape)}: [1, {k}] needed"
    assert out.shape == (1, n) and out.is_contiguous(), f"out {tuple(out.shape)}: [1, {n}] needed"
    assert weight.is_contiguous() and weight.dtype == x.dtype, f"weight {weight.dtype}, x {x.dtype}: contiguous, alike"
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
        BLOCK_K=256 * warps * unroll,
        STAGES=min(stages, triton.cdiv(k, 256 * warps * unroll)),
        EVEN_N=n % rows == 0,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
