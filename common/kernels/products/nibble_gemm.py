"""Product of a few tokens and a matrix of codes of 4 bits on the matrix unit, with neighbours fused in.

A program's warps divide the columns. A warp reads blocks of 16 rows: 16 bytes a thread, in the order of its operands
(`tiles.nibble_mma`), so no code changes threads. Tiles of weights and the scales of their groups are on the way before
the wait for the predecessor. Only the warps' sums pass through shared memory, and a lone token, which is the same for
all rows, with the norm's weights applied.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.base.checks import check_ending
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.tiles.ending import store_product
from common.kernels.products.tiles.nibble_mma import multiplying, operands, summing, widening
from common.kernels.products.tiles.nibbles import (
    layouts,
    load_scales,
    load_tile,
    loaded_operands,
    rows_of_sides,
    share_token,
    shared_operands,
    starts_of,
)
from common.kernels.products.wide_codes import check_codes_alone

MAX_TOKENS = 32
MATRIX_ROWS = 16  # of a product of the matrix unit, in two halves
BLOCK = 128  # columns in 64 bytes of a row
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
EXCESS = {torch.bfloat16: 128.0, torch.float16: 1024.0}  # of codes in pairs
MAX_REGISTERS = {8: 128}  # of a thread, so that a multiprocessor has two programs of so many warps
MIDDLE = 8.0  # subtracted from codes without offsets


@gluon.jit
def _widened(words, WIDEN: gl.constexpr):
    """Return the four pairs of codes of each word."""
    types: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    return gl.inline_asm_elementwise(WIDEN, "=r,=r,=r,=r,r", [words], dtype=types, is_pure=True, pack=1)


@gluon.jit
def _sums_of(x, SUM: gl.constexpr, OF_SUM: gl.constexpr, SUMS: gl.constexpr):
    """Return sums of tokens over blocks, or over each of their four groups, as a tuple."""
    if SUMS == 1:
        sums = (gl.inline_asm_elementwise(SUM, OF_SUM, x, dtype=gl.float32, is_pure=True, pack=4),)
    else:
        types: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
        sums = gl.inline_asm_elementwise(SUM, OF_SUM, x, dtype=types, is_pure=True, pack=4)
    return sums


@gluon.jit
def _multiply(upper, lower, x, x_sums, sums, scales, MULTIPLY: gl.constexpr, OF_PRODUCT: gl.constexpr):
    """Add scaled products of two halves' pairs and 8 tokens to sums `[8, chunks, 4]`; `scales` has offsets, too."""
    return gl.inline_asm_elementwise(
        MULTIPLY,
        OF_PRODUCT,
        upper + lower + x + x_sums + (sums,) + scales,
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _multiply_tile(loaded, xs, x_sums, sums, WIDEN: gl.constexpr, MULTIPLY: gl.constexpr, OF_PRODUCT: gl.constexpr):
    """Return sums of all sixteens of rows and eights of tokens with a tile's products, as a tuple."""
    tile, scales, offsets = loaded
    later = ()
    for h in gl.static_range(len(tile) // 2):
        upper = _widened(tile[2 * h], WIDEN)
        lower = _widened(tile[2 * h + 1], WIDEN)
        numbers = scales[2 * h].to(gl.float32), scales[2 * h + 1].to(gl.float32)
        if len(offsets) > 0:
            numbers += (offsets[2 * h].to(gl.float32), offsets[2 * h + 1].to(gl.float32))  # type: ignore[assignment]
        for j in gl.static_range(len(xs)):
            before = sums[h * len(xs) + j]
            some = _multiply(upper, lower, xs[j], x_sums[j], before, numbers, MULTIPLY, OF_PRODUCT)
            later = later + (some,)  # type: ignore[assignment]
    return later


@gluon.jit
def _end(sums, scale, row, m, n, residual_ptr, bias_ptr, out_ptr, SPLITS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
         GATED: gl.constexpr, ACTIVATION: gl.constexpr, SIXTEENS: gl.constexpr, BLOCKS: gl.constexpr,
         LAYOUT: gl.constexpr):  # fmt: skip
    """Add up the warps' sums of all sixteens of rows and eights of tokens, finish and store them."""
    EIGHTS: gl.constexpr = len(sums) // SIXTEENS
    eight = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    for h in gl.static_range(SIXTEENS):
        rows = row + h * (8 if GATED else 16) + eight
        for j in gl.static_range(EIGHTS):
            total = gl.sum(gl.reshape(sums[h * EIGHTS + j], [8, BLOCKS, 4, 2, 2]), axis=1) * scale
            upper, lower = gl.split(gl.permute(total, [0, 1, 3, 2]))
            upper = gl.convert_layout(gl.reshape(upper, [8, 8]), LAYOUT)
            lower = gl.convert_layout(gl.reshape(lower, [8, 8]), LAYOUT)
            inside_m = (8 * j + tokens < m)[None, :]
            places = (8 * j + tokens)[None, :].to(gl.int64) * n + rows[:, None]
            store_product(
                upper, lower, bias_ptr, residual_ptr, out_ptr, rows, rows < n, places, inside_m & (rows < n)[:, None],
                m * n, SPLITS, HAS_RESIDUAL, GATED, ACTIVATION,
            )  # fmt: skip
            if not GATED:
                store_product(
                    lower, upper, bias_ptr, residual_ptr, out_ptr, rows + 8, rows + 8 < n, places + 8,
                    inside_m & (rows + 8 < n)[:, None], m * n, SPLITS, HAS_RESIDUAL, False, None,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["m"])
def _nibble_gemm_kernel(
    x_ptr,  # [m, K], contiguous; in pairs if not LONE
    weight_ptr,  # [n, K / 8] words of 8 codes, contiguous; twice the rows if GATED: gate, then up
    scales_ptr,  # [n, K / GROUP]; twice the rows if GATED
    offsets_ptr,  # as scales_ptr, or None
    norm_ptr,  # [K], if HAS_NORM
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    eps,
    m,
    n,
    K: gl.constexpr,
    GROUP: gl.constexpr,  # columns that share a scale
    LONE: gl.constexpr,  # m is 1
    EIGHTS: gl.constexpr,  # of tokens
    SIXTEENS: gl.constexpr,  # of rows of the matrix
    SPLITS: gl.constexpr,
    TILES: gl.constexpr,  # of a program
    STAGES: gl.constexpr,  # tiles on the way before the wait; at most TILES
    EVEN: gl.constexpr,  # no row and no block of a tile is outside
    HAS_NORM: gl.constexpr,  # of a lone token
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    WIDEN: gl.constexpr,  # instructions and constraints of their operands
    SUM: gl.constexpr,
    OF_SUM: gl.constexpr,
    MULTIPLY: gl.constexpr,
    OF_PRODUCT: gl.constexpr,
    TILE_LAYOUT: gl.constexpr,  # of [8, chunks, 4]
    TOKEN_LAYOUT: gl.constexpr,  # of [blocks, 4, 4, 2, 2]
    OUT_LAYOUT: gl.constexpr,  # of [8, 8]
    num_warps: gl.constexpr,
):
    """Grid: (programs of 16 * SIXTEENS rows of the matrix, SPLITS)."""
    BLOCKS: gl.constexpr = num_warps
    COLUMNS: gl.constexpr = 128 * BLOCKS
    SUMS: gl.constexpr = 4 if GROUP < 128 else 1
    row = gl.program_id(0) * ((8 if GATED else 16) * SIXTEENS)
    first = gl.program_id(1) * (TILES * BLOCKS)
    eight = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, TILE_LAYOUT)))
    chunks = gl.arange(0, 4 * BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, TILE_LAYOUT)))
    words = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, TILE_LAYOUT)))
    blocks = (first + chunks // 4)[None, :, None]
    blocks_left = min(K // 128, first + TILES * BLOCKS) - blocks
    within = (first * 4 + chunks)[None, :, None] * 4 + words[None, None, :]
    sides, insides = rows_of_sides(row, n, eight, SIXTEENS, GATED)
    ptrs = starts_of(weight_ptr, sides, within, K // 8)
    scale_ptrs = starts_of(scales_ptr, sides, 0, K // GROUP)
    offset_ptrs = starts_of(offsets_ptr, sides, 0, K // GROUP)
    loaded, norms, token, token_sums, sums = (), (), (), (), ()
    for i in gl.static_range(STAGES):
        tile = load_tile(ptrs, insides, blocks_left, i, BLOCKS, EVEN)
        scales = load_scales(scale_ptrs, insides, blocks_left, blocks, words, i, BLOCKS, GROUP, EVEN)
        offsets = load_scales(offset_ptrs, insides, blocks_left, blocks, words, i, BLOCKS, GROUP, EVEN)
        loaded = loaded + ((tile, scales, offsets),)  # type: ignore[assignment]
    token_layout: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    columns = gl.arange(0, COLUMNS, token_layout)
    if HAS_NORM:
        for i in gl.static_range(TILES):
            norm = gl.load(norm_ptr + i * COLUMNS + columns, mask=columns < K - i * COLUMNS, other=0.0)
            norms = norms + (norm,)  # type: ignore[assignment]
    wait_for_predecessor(PDL)
    scale = 1.0
    if LONE:
        begin = first * 128 if SPLITS > 1 else 0
        token, token_sums, scale = share_token(
            x_ptr + begin, norms, eps, columns, K - begin, TILES, COLUMNS, HAS_NORM, SUMS, token_layout, TILE_LAYOUT
        )

    for _ in gl.static_range(SIXTEENS * EIGHTS):
        sums = sums + (gl.zeros([8, 4 * BLOCKS, 4], gl.float32, TILE_LAYOUT),)  # type: ignore[assignment]
    pairs = blocks * 64 + (chunks % 4)[None, :, None] + 4 * words[None, None, :]
    for i in gl.static_range(TILES):
        if i + STAGES < TILES:
            tile = load_tile(ptrs, insides, blocks_left, i + STAGES, BLOCKS, EVEN)
            scales = load_scales(scale_ptrs, insides, blocks_left, blocks, words, i + STAGES, BLOCKS, GROUP, EVEN)
            offsets = load_scales(offset_ptrs, insides, blocks_left, blocks, words, i + STAGES, BLOCKS, GROUP, EVEN)
            loaded = loaded + ((tile, scales, offsets),)  # type: ignore[assignment]
        xs, x_sums = (), ()
        for j in gl.static_range(EIGHTS):
            if LONE:
                x = shared_operands(token[i], TOKEN_LAYOUT, TILE_LAYOUT, BLOCKS)
                x_sums = x_sums + (token_sums[i],)  # type: ignore[assignment]
            else:
                token_ptr = x_ptr + gl.minimum(8 * j + eight, m - 1)[:, None, None] * (K // 2) + pairs
                x = loaded_operands(token_ptr + i * (64 * BLOCKS), blocks_left > i * BLOCKS, EVEN)
                x_sums = x_sums + (_sums_of(x, SUM, OF_SUM, SUMS),)  # type: ignore[assignment]
            xs = xs + (x,)  # type: ignore[assignment]
        sums = _multiply_tile(loaded[i], xs, x_sums, sums, WIDEN, MULTIPLY, OF_PRODUCT)
    _end(
        sums, scale, row, m, n, residual_ptr, bias_ptr, out_ptr, SPLITS, HAS_RESIDUAL, GATED, ACTIVATION, SIXTEENS,
        BLOCKS, OUT_LAYOUT,
    )  # fmt: skip


def nibble_gemm(
    x: Tensor,  # [m, k] in 16 bits, contiguous, m up to MAX_TOKENS
    weight: Tensor,  # packed uint8 [n, k / 2]; [2 * n, k / 2] with an activation
    scales: Tensor,  # fp16 or fp32 [n, groups]; twice the rows with an activation
    offsets: Tensor | None,  # as `scales`
    out: Tensor,  # [m, n], or fp32 parts [splits, m, n]; overwritten
    *,
    rows: int,
    warps: int,
    stages: int,
    splits: int = 1,
    norm: Tensor | None = None,  # [k], of a lone token
    eps: float = 0.0,
    residual: Tensor | None = None,  # [m, n], without splits only; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    pdl: bool = False,
) -> Tensor:
    """Write `norm(x) @ weight.T + bias`, then `+ residual` or `activation(gate) * up`, to `out`; return `out`.

    With `splits`, write parts, the first with the bias. A program has `rows` rows of the matrix, in
    16s, and `warps` warps, each with a block of columns of a tile. `stages` tiles are on the way before the wait for
    the predecessor.
    """
    (m, k), n = x.shape, weight.shape[0] // (1 if activation is None else 2)
    group, has_offsets = check_codes_alone(weight, scales, offsets).group, offsets is not None
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    assert x.dtype in NAMES, f"x of {x.dtype}: 16 bits needed"
    assert x.is_contiguous() and weight.shape[1] * 2 == k, f"x {tuple(x.shape)}, {weight.shape[1]} bytes: alike"
    shape = (splits, m, n) if splits > 1 else (m, n)
    assert out.shape == shape and out.is_contiguous(), f"out {tuple(out.shape)}: contiguous {shape} needed"
    assert rows > 0 and rows % MATRIX_ROWS == 0, f"{rows} rows of a program: a multiple of {MATRIX_ROWS} needed"
    assert splits == 1 or (residual is None and activation is None), f"{splits} splits: parts are sums alone"
    assert norm is None or (norm.shape == (k,) and m == splits == 1), (
        f"{m} tokens, {splits} splits: norms of one, [{k}]"
    )
    assert residual is None or residual.shape == (m, n), f"residual {tuple(residual.shape)}: ({m}, {n}) needed"
    check_ending(n, bias, activation)
    name, sums, outputs = NAMES[x.dtype], 4 if group < BLOCK else 1, rows // (1 if activation is None else 2)
    tiles = -(-k // (BLOCK * warps * splits))
    of_sum, of_product = operands(sums, has_offsets=has_offsets)
    excess = EXCESS[x.dtype] + (0.0 if has_offsets else MIDDLE)
    _nibble_gemm_kernel[(-(-n // outputs), splits)](
        x_ptr=x if m == 1 else x.view(torch.int32),
        weight_ptr=weight.view(torch.int32),
        scales_ptr=scales,
        offsets_ptr=offsets,
        norm_ptr=x if norm is None else norm,
        residual_ptr=out if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        eps=eps,
        m=m,
        n=n,
        K=k,
        GROUP=group,
        LONE=m == 1,
        EIGHTS=-(-m // 8),
        SIXTEENS=rows // MATRIX_ROWS,
        SPLITS=splits,
        TILES=tiles,
        STAGES=min(stages, tiles),
        EVEN=n % outputs == 0 and k == tiles * splits * BLOCK * warps,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        WIDEN=widening(name),
        SUM=summing(name, sums),
        OF_SUM=of_sum,
        MULTIPLY=multiplying(name, sums, excess, has_offsets=has_offsets, is_lone=m == 1),
        OF_PRODUCT=of_product,
        TILE_LAYOUT=layouts(warps).tile,
        TOKEN_LAYOUT=layouts(warps).token,
        OUT_LAYOUT=layouts(warps).out,
        num_warps=warps,
        maxnreg=MAX_REGISTERS.get(warps),
        launch_pdl=pdl,
    )
    return out
