"""Product of a token and a weight matrix in codes of 8 bits on the matrix unit, with neighbours fused in.

A row of FP32 instructions for each weight would take longer than reading it. So codes are widened to fp16, two by an
instruction, and multiplied by `mma` instructions. Of an `mma` with 16 rows, 16 columns and 8 tokens, all 8 tokens are
the same one.

The order of columns in a sum is free. A thread has 16 neighbouring codes of a row, in four words. Each word is what the
thread holds of an `mma`, so no code changes threads. Quads of threads hold 64 columns of 8 rows, and of 8 more rows.

The token is held in shared memory in fp16, normed, or divided by SCALE. Larger numbers than 65,504, or 65,504 * SCALE,
are cut off. The first tiles of weights are on the way before the wait for the predecessor, as in `gemv`.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.base.checks import check_ending
from common.kernels.base.codes import check_scales
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor

COLUMNS = 16  # of a row of a tile, for each thread
WORDS = 4  # of them, of four codes
QUAD = 4  # threads beside each other in a row
CODES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.uint8: "bytes"}
HALF = 8  # rows of a tile's half for each `mma`

WORDS_OF_TILE = gl.constexpr(WORDS)
SCALE = gl.constexpr(16.0)
COPIES = gl.constexpr(4.0)  # of each sum, in a quad of threads

WIDEN_E4M3 = gl.constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
WIDEN_INT8 = gl.constexpr("""
{
    .reg .b32 codes, first, second, offset;
    xor.b32 codes, $2, 0x80808080;
    prmt.b32 first, codes, 0x64646464, 0x4140;
    prmt.b32 second, codes, 0x64646464, 0x4342;
    mov.b32 offset, 0x64806480;
    sub.rn.f16x2 $0, first, offset;
    sub.rn.f16x2 $1, second, offset;
}
""")
WIDEN_BYTES = gl.constexpr("""
{
    .reg .b32 high, rest;
    prmt.b32 high, $2, 0, 0x1404;
    shr.u32 rest, high, 1;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $0, high, 0x80008000, rest, 0xea;
    prmt.b32 high, $2, 0, 0x3424;
    shr.u32 rest, high, 1;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 $1, high, 0x80008000, rest, 0xea;
}
""")
MULTIPLY = gl.constexpr("""
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};
""")


@gluon.jit
def _widened(words, CODES: gl.constexpr):
    """Return two pairs of fp16 for each word of four codes, exactly."""
    asm: gl.constexpr = WIDEN_INT8 if CODES == "int8" else WIDEN_E4M3 if CODES == "e4m3" else WIDEN_BYTES
    return gl.inline_asm_elementwise(asm, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _multiply(upper, lower, x, other_x, acc, CODES: gl.constexpr):
    """Add products of two halves of a tile and the token to sums, of which the first and third are of use."""
    upper, other_upper = _widened(upper, CODES)
    lower, other_lower = _widened(lower, CODES)
    return gl.inline_asm_elementwise(
        MULTIPLY,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [upper, lower, other_upper, other_lower, x, other_x, acc[0], acc[1], acc[2], acc[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_tile(tile_ptr, inside_n, chunks, INDEX: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr,
               EVEN_N: gl.constexpr):  # fmt: skip
    """Load the words INDEX of a half of a tile, `[ROWS, chunks, 4]`; read once, so evicted first."""
    tile_ptr += INDEX * (BLOCK_K // 4)
    if (INDEX + 1) * BLOCK_K <= K and EVEN_N:
        tile = gl.load(tile_ptr, eviction_policy="evict_first")
    else:
        inside = inside_n & (chunks * 16 < K - INDEX * BLOCK_K)[None, :, None]
        tile = gl.load(tile_ptr, mask=inside, other=0, eviction_policy="evict_first")
    return tile


@gluon.jit
def _load_vector(vector_ptr, columns, INDEX: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr):
    """Load the numbers of a vector beside the tile INDEX: `[BLOCK_K]` fp32."""
    inside = columns < K - INDEX * BLOCK_K
    return gl.load(vector_ptr + INDEX * BLOCK_K + columns, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _row_scales(scales_ptr, rows, chunks, INDEX: gl.constexpr, n_rows, K: gl.constexpr, BLOCK_K: gl.constexpr,
                SCALE_ROWS: gl.constexpr):  # fmt: skip
    """Load scales of groups for rows and chunks of the tile INDEX: `[ROWS, chunks, 1]`."""
    GROUPS: gl.constexpr = (K + 127) // 128
    group = (INDEX * BLOCK_K + chunks * 16) // 128
    inside = (rows < n_rows)[:, None] & (group < GROUPS)[None, :]
    scales = gl.load(scales_ptr + (rows // SCALE_ROWS * GROUPS)[:, None] + group[None, :], mask=inside, other=0.0)
    return gl.expand_dims(scales, 2)


@gluon.jit
def _ended(y, rows, n, residual_ptr, bias_ptr, out_ptr, HAS_RESIDUAL: gl.constexpr):
    """Add bias and residual to finished outputs and store them."""
    if bias_ptr is not None:
        y += gl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(gl.float32)
    if HAS_RESIDUAL:
        y += gl.load(residual_ptr + rows, mask=rows < n, other=0.0).to(gl.float32)
    gl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < n)


@gluon.jit
def _quantized_gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [n, K / 4] words of codes, contiguous; [2 * n, K / 4] if GATED: gate, then up
    scales_ptr,  # [n], or [cdiv(n, SCALE_ROWS), cdiv(K, 128)] if GROUPED; twice the rows if GATED
    norm_ptr,  # [K], if HAS_NORM
    residual_ptr,  # [n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [n]
    eps,
    n,
    K: gl.constexpr,  # a multiple of 16
    ROWS: gl.constexpr,  # of a half of a tile
    BLOCK_K: gl.constexpr,  # 64 a warp
    STAGES: gl.constexpr,  # tiles on the way before the wait; at most the number of tiles
    EVEN_N: gl.constexpr,  # programs have no rows outside
    CODES: gl.constexpr,  # "int8", "e4m3", or "bytes" of e4m3 without an instruction for it
    GROUPED: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    TILE_LAYOUT: gl.constexpr,  # of [ROWS, BLOCK_K / 16, 4]
    TOKEN_LAYOUT: gl.constexpr,  # of [BLOCK_K / 16, 4, 2]
    num_warps: gl.constexpr,
):
    """Grid: programs of 2 * ROWS outputs, or ROWS if GATED. The lower half of a tile has the next rows, or up's."""
    TILES: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    CHUNKS: gl.constexpr = BLOCK_K // 16
    WIDTH: gl.constexpr = K // 4
    X_SCALE: gl.constexpr = 1.0 if HAS_NORM else SCALE
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, TILE_LAYOUT))
    chunk_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, TILE_LAYOUT))
    word_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, TILE_LAYOUT))
    fragment_layout: gl.constexpr = gl.SliceLayout(0, TILE_LAYOUT)
    row = gl.program_id(0) * (ROWS if GATED else 2 * ROWS)
    rows = row + gl.arange(0, ROWS, row_layout)
    chunks = gl.arange(0, CHUNKS, chunk_layout)
    words = gl.arange(0, WORDS_OF_TILE, word_layout)
    lower_rows = n + rows if GATED else ROWS + rows
    n_rows = 2 * n if GATED else n
    within = (chunks * 4)[None, :, None] + words[None, None, :]
    upper_ptr = weight_ptr + (rows.to(gl.int64) * WIDTH)[:, None, None] + within
    lower_ptr = weight_ptr + (lower_rows.to(gl.int64) * WIDTH)[:, None, None] + within
    inside = (rows < n)[:, None, None]
    lower_inside = (lower_rows < n_rows)[:, None, None]

    uppers = (_load_tile(upper_ptr, inside, chunks, 0, K, BLOCK_K, EVEN_N),)
    lowers = (_load_tile(lower_ptr, lower_inside, chunks, 0, K, BLOCK_K, EVEN_N),)
    for i in gl.static_range(1, STAGES):
        uppers = uppers + (_load_tile(upper_ptr, inside, chunks, i, K, BLOCK_K, EVEN_N),)  # type: ignore[assignment]
        lowers = lowers + (_load_tile(lower_ptr, lower_inside, chunks, i, K, BLOCK_K, EVEN_N),)  # type: ignore[assignment]

    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token = ()
    for _ in gl.static_range(TILES):
        token = token + (gl.allocate_shared_memory(gl.float16, [BLOCK_K], shared_layout),)  # type: ignore[assignment]
    columns_layout: gl.constexpr = gl.BlockedLayout([2], [32], [num_warps], [0])
    columns = gl.arange(0, BLOCK_K, columns_layout)
    norms = ()
    if HAS_NORM:
        for i in gl.static_range(TILES):
            norms = norms + (_load_vector(norm_ptr, columns, i, K, BLOCK_K),)  # type: ignore[assignment]
    wait_for_predecessor(PDL)
    xs = ()
    for i in gl.static_range(TILES):
        xs = xs + (_load_vector(x_ptr, columns, i, K, BLOCK_K),)  # type: ignore[assignment]
    scale = 1 / X_SCALE
    if HAS_NORM:
        squares = gl.zeros([BLOCK_K], gl.float32, columns_layout)
        for i in gl.static_range(TILES):
            squares += xs[i] * xs[i]
        scale = gl.rsqrt(gl.sum(squares, axis=0) / K + eps)
    for i in gl.static_range(TILES):
        x = xs[i] * scale
        if HAS_NORM:
            x *= norms[i]
        token[i].store(gl.minimum(gl.maximum(x, -65504.0), 65504.0).to(gl.float16))

    pairs_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    zero = gl.zeros([ROWS, CHUNKS, WORDS_OF_TILE], gl.float32, TILE_LAYOUT)
    acc = (zero, zero, zero, zero)
    upper_sum = zero
    lower_sum = zero
    for i in gl.static_range(TILES):
        if i + STAGES < TILES:
            uppers = uppers + (_load_tile(upper_ptr, inside, chunks, i + STAGES, K, BLOCK_K, EVEN_N),)  # type: ignore[assignment]
            lowers = lowers + (_load_tile(lower_ptr, lower_inside, chunks, i + STAGES, K, BLOCK_K, EVEN_N),)  # type: ignore[assignment]
        pairs = token[i]._reinterpret(gl.int32, [CHUNKS, WORDS_OF_TILE, 2], pairs_layout)  # type: ignore[var-annotated]
        x, other_x = gl.split(pairs.load(TOKEN_LAYOUT))
        x = gl.expand_dims(gl.convert_layout(x, fragment_layout), 0)
        other_x = gl.expand_dims(gl.convert_layout(other_x, fragment_layout), 0)
        acc = _multiply(uppers[i], lowers[i], x, other_x, acc, CODES)
        if GROUPED:
            upper_sum += acc[0] * _row_scales(scales_ptr, rows, chunks, i, n, K, BLOCK_K, SCALE_ROWS)
            lower_sum += acc[2] * _row_scales(scales_ptr, lower_rows, chunks, i, n_rows, K, BLOCK_K, SCALE_ROWS)
            acc = (zero, zero, zero, zero)
    if not GROUPED:
        upper_sum = acc[0]
        lower_sum = acc[2]

    SUM_SCALE: gl.constexpr = X_SCALE / COPIES * (256.0 if CODES == "bytes" else 1.0)
    both = gl.join(gl.sum(upper_sum, axis=2), gl.sum(lower_sum, axis=2))
    y, other_y = gl.split(gl.sum(both, axis=1) * SUM_SCALE)
    y = gl.convert_layout(y, row_layout)
    other_y = gl.convert_layout(other_y, row_layout)
    if not GROUPED:
        y *= gl.load(scales_ptr + rows, mask=rows < n, other=0.0)
        other_y *= gl.load(scales_ptr + lower_rows, mask=lower_rows < n_rows, other=0.0)
    if GATED:
        _ended(gated(y, other_y, ACTIVATION), rows, n, residual_ptr, bias_ptr, out_ptr, HAS_RESIDUAL)
    else:
        _ended(y, rows, n, residual_ptr, bias_ptr, out_ptr, HAS_RESIDUAL)
        _ended(other_y, lower_rows, n, residual_ptr, bias_ptr, out_ptr, HAS_RESIDUAL)


@cache
def _layouts(rows: int, warps: int) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """Return layouts of a tile's half in words, `[rows, 4 * warps, 4]`, and of the token beside it in pairs."""
    halves = [HALF << i for i in range((rows // HALF).bit_length() - 1)]
    bits = [QUAD << i for i in range(warps.bit_length() - 1)]
    tile = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *([half, 0, 0] for half in halves)],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[0, bit, 0] for bit in bits],
        block_bases=[],
        shape=[rows, QUAD * warps, WORDS],
    )
    token = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 1, 0], [0, 2, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        warp_bases=[[bit, 0, 0] for bit in bits],
        block_bases=[],
        shape=[QUAD * warps, WORDS, 2],
    )
    return tile, token


def quantized_gemv(
    x: Tensor,  # [1, k], contiguous
    weight: Tensor,  # [n, k] int8, e4m3, or e4m3 as uint8; [2 * n, k] with an activation
    scales: Tensor,  # fp32 [n, 1], or of groups of columns; twice the rows with an activation
    out: Tensor,  # [1, n]; overwritten
    *,
    rows: int,
    warps: int,
    stages: int = 1,
    norm: Tensor | None = None,  # [k]
    eps: float = 0.0,
    residual: Tensor | None = None,  # [1, n]; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    pdl: bool = False,
) -> Tensor:
    """Write `norm(x) @ weight.T`, then `+ bias + residual` or `activation(gate) * up`, to `out`; return `out`.

    A program multiplies `2 * rows` rows, a multiple of 16, by `warps` warps, each of which has 64 columns of a tile.
    `stages` tiles are on the way before the wait for the predecessor.
    """
    n, k = weight.shape[0] // (1 if activation is None else 2), weight.shape[1]
    assert x.shape == (1, k) and x.is_contiguous(), f"x {tuple(x.shape)}: [1, {k}] needed"
    assert out.shape == (1, n) and out.is_contiguous(), f"out {tuple(out.shape)}: [1, {n}] needed"
    assert weight.is_contiguous() and weight.dtype in CODES, f"weight {weight.dtype}: codes needed"
    assert k % COLUMNS == 0, f"{k} columns: a multiple of {COLUMNS} needed"
    assert rows % HALF == 0, f"{rows} rows: a multiple of {HALF} needed"
    assert norm is None or norm.shape == (k,), f"norm weight: [{k}] needed"
    assert residual is None or residual.shape == (1, n), f"residual: [1, {n}] needed"
    check_ending(n, bias, activation)
    is_grouped, scale_rows = check_scales(None, weight, scales)
    block_k, outputs = QUAD * COLUMNS * warps, rows * (2 if activation is None else 1)
    tile_layout, token_layout = _layouts(rows, warps)
    _quantized_gemv_kernel[(-(-n // outputs),)](
        x_ptr=x,
        weight_ptr=weight.view(torch.int32),
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
        STAGES=min(stages, -(-k // block_k)),
        EVEN_N=n % outputs == 0,
        CODES=CODES[weight.dtype],
        GROUPED=is_grouped,
        SCALE_ROWS=scale_rows,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        TILE_LAYOUT=tile_layout,
        TOKEN_LAYOUT=token_layout,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
