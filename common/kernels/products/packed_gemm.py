"""Product of a few tokens and a matrix of packed codes on the matrix unit, with neighbours fused in.

A program's warps divide the columns. A warp reads blocks of 16 rows: 16 bytes a thread, in the order of its operands
(`tiles.packed_mma`), so no code changes threads. Tiles of weights and the scales of their groups are on the way before
the wait for the predecessor. Only the warps' sums pass through shared memory, and a lone token, which is the same for
all rows, with the norm's weights applied.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.packed_checks import NAMES, check_packed_product
from common.kernels.products.tiles.ending import store_product
from common.kernels.products.tiles.packed_floats import beside_words, factors_of_rows, floating
from common.kernels.products.tiles.packed_mma import EXCESS, adding, multiplying, operands, summing, widening
from common.kernels.products.tiles.packed_operands import constraints, scaling
from common.kernels.products.tiles.packed_tiles import (
    layouts,
    load_scales,
    load_tile,
    loaded_operands,
    rows_of_sides,
    share_token,
    shared_operands,
    starts_of,
)

MAX_TOKENS = 32
ONCE = 8  # tokens that are multiplied at once; beside more, elements of narrow groups take less than scaling sums does
MATRIX_ROWS = 16  # of a product of the matrix unit, in two halves
MAX_REGISTERS = {8: 128}  # of a thread, so that a multiprocessor has two programs of so many warps
MIDDLE = 8.0  # subtracted from codes of 4 bits without offsets


@gluon.jit
def _widened(words, BITS: gl.constexpr, WIDEN: gl.constexpr, OF_WORD: gl.constexpr):
    """Return the pairs of codes of each word: four of 4 bits, two of 8; of elements if scales are beside words."""
    if BITS == 4:
        four: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
        pairs = gl.inline_asm_elementwise(WIDEN, OF_WORD, words, dtype=four, is_pure=True, pack=1)
    else:
        two: gl.constexpr = (gl.int32, gl.int32)
        pairs = gl.inline_asm_elementwise(WIDEN, OF_WORD, words, dtype=two, is_pure=True, pack=1)
    return pairs


@gluon.jit
def _sums_of(x, SUM: gl.constexpr, OF_SUM: gl.constexpr, SUMS: gl.constexpr):
    """Return sums of tokens over blocks, or over the columns of each word, as a tuple; none if SUMS is 0."""
    sums = ()
    if SUMS == 1:
        sums = (gl.inline_asm_elementwise(SUM, OF_SUM, x, dtype=gl.float32, is_pure=True, pack=4),)  # type: ignore[assignment]
    if SUMS == 4:
        types: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
        sums = gl.inline_asm_elementwise(SUM, OF_SUM, x, dtype=types, is_pure=True, pack=4)
    return sums


@gluon.jit
def _multiply(upper, lower, x, x_sums, sums, scales, MULTIPLY: gl.constexpr, OF_PRODUCT: gl.constexpr):
    """Add products of two halves' pairs and 8 tokens to sums `[8, chunks, 4]`; by `scales`, with offsets, if any."""
    return gl.inline_asm_elementwise(
        MULTIPLY,
        OF_PRODUCT,
        upper + lower + x + x_sums + (sums,) + scales,
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _multiply_tile(loaded, xs, x_sums, sums, BITS: gl.constexpr, WIDEN: gl.constexpr, OF_WORD: gl.constexpr,
                   MULTIPLY: gl.constexpr, OF_PRODUCT: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """Return sums of all sixteens of rows and eights of tokens with a tile's products, as a tuple."""
    tile, scales, offsets = loaded
    later = ()
    for h in gl.static_range(len(tile) // 2):
        numbers = beside_words(scales[2 * h]), beside_words(scales[2 * h + 1])
        if len(offsets) > 0:
            numbers += (offsets[2 * h].to(gl.float32), offsets[2 * h + 1].to(gl.float32))  # type: ignore[assignment]
        of_upper, of_lower = (tile[2 * h],), (tile[2 * h + 1],)
        if SCALED:
            for i in gl.static_range(len(numbers) // 2):
                of_upper = of_upper + (numbers[2 * i],)  # type: ignore[assignment]
                of_lower = of_lower + (numbers[2 * i + 1],)  # type: ignore[assignment]
            numbers = ()  # type: ignore[assignment]
        upper = _widened(of_upper, BITS, WIDEN, OF_WORD)
        lower = _widened(of_lower, BITS, WIDEN, OF_WORD)
        for j in gl.static_range(len(xs)):
            before = sums[h * len(xs) + j]
            some = _multiply(upper, lower, xs[j], x_sums[j], before, numbers, MULTIPLY, OF_PRODUCT)
            later = later + (some,)  # type: ignore[assignment]
    return later


@gluon.jit
def _end(sums, scale, row, m, n, factors_ptr, residual_ptr, bias_ptr, out_ptr, SPLITS: gl.constexpr,
         HAS_RESIDUAL: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, SIXTEENS: gl.constexpr,
         BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
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
            if factors_ptr is not None:
                lower_rows = rows + n if GATED else rows + 8
                upper *= factors_of_rows(factors_ptr, rows, rows < n)
                lower *= factors_of_rows(factors_ptr, lower_rows, rows < n if GATED else rows + 8 < n)
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
def _packed_gemm_kernel(
    x_ptr,  # [m, K], contiguous; in pairs if not LONE
    weight_ptr,  # [n, K * BITS / 32] words, contiguous; twice the rows if GATED: gate, then up
    scales_ptr,  # [n, K / GROUP], of e2m1 numbers of two scales; twice the rows if GATED
    offsets_ptr,  # as scales_ptr, or None
    factors_ptr,  # [n] of rows of e2m1, or None; twice the rows if GATED
    norm_ptr,  # [K], if HAS_NORM
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    eps,
    m,
    n,
    K: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # columns that share a scale, or a number of two
    LONE: gl.constexpr,  # m is 1
    SCALED: gl.constexpr,  # elements are multiplied, not codes
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
    SUMS: gl.constexpr,  # of tokens, of a block; 0: none is needed
    WIDEN: gl.constexpr,  # instructions and constraints of their operands
    OF_WORD: gl.constexpr,
    SUM: gl.constexpr,
    OF_SUM: gl.constexpr,
    MULTIPLY: gl.constexpr,
    OF_PRODUCT: gl.constexpr,
    TILE_LAYOUT: gl.constexpr,  # of [8, chunks, 4]
    TOKEN_LAYOUT: gl.constexpr,  # of [blocks, 4, 4, BLOCK / 64, 2]
    OUT_LAYOUT: gl.constexpr,  # of [8, 8]
    num_warps: gl.constexpr,
):
    """Grid: (programs of 16 * SIXTEENS rows of the matrix, SPLITS)."""
    BLOCKS: gl.constexpr = num_warps
    BLOCK: gl.constexpr = 512 // BITS
    COLUMNS: gl.constexpr = BLOCK * BLOCKS
    row = gl.program_id(0) * ((8 if GATED else 16) * SIXTEENS)
    first = gl.program_id(1) * (TILES * BLOCKS)
    eight = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, TILE_LAYOUT)))
    chunks = gl.arange(0, 4 * BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, TILE_LAYOUT)))
    words = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, TILE_LAYOUT)))
    blocks = (first + chunks // 4)[None, :, None]
    blocks_left = min(K // BLOCK, first + TILES * BLOCKS) - blocks
    within = (first * 4 + chunks)[None, :, None] * 4 + words[None, None, :]
    sides, insides = rows_of_sides(row, n, eight, SIXTEENS, GATED)
    ptrs = starts_of(weight_ptr, sides, within, K * BITS // 32)
    scale_ptrs = starts_of(scales_ptr, sides, 0, K // GROUP)
    offset_ptrs = starts_of(offsets_ptr, sides, 0, K // GROUP)
    loaded, norms, token, token_sums, sums = (), (), (), (), ()
    for i in gl.static_range(STAGES):
        tile = load_tile(ptrs, insides, blocks_left, i, BLOCKS, EVEN)
        scales = load_scales(scale_ptrs, insides, blocks_left, blocks, words, i, BLOCKS, BLOCK, GROUP, EVEN)
        offsets = load_scales(offset_ptrs, insides, blocks_left, blocks, words, i, BLOCKS, BLOCK, GROUP, EVEN)
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
        begin = first * BLOCK if SPLITS > 1 else 0
        token, token_sums, scale = share_token(
            x_ptr + begin, norms, eps, columns, K - begin, TILES, COLUMNS, HAS_NORM, SUMS if BITS == 4 else 0,
            token_layout, TILE_LAYOUT,
        )  # fmt: skip

    for _ in gl.static_range(SIXTEENS * EIGHTS):
        sums = sums + (gl.zeros([8, 4 * BLOCKS, 4], gl.float32, TILE_LAYOUT),)  # type: ignore[assignment]
    pairs = blocks * (BLOCK // 2) + (chunks % 4)[None, :, None] + 4 * words[None, None, :]
    for i in gl.static_range(TILES):
        if i + STAGES < TILES:
            tile = load_tile(ptrs, insides, blocks_left, i + STAGES, BLOCKS, EVEN)
            scales = load_scales(
                scale_ptrs, insides, blocks_left, blocks, words, i + STAGES, BLOCKS, BLOCK, GROUP, EVEN
            )
            offsets = load_scales(
                offset_ptrs, insides, blocks_left, blocks, words, i + STAGES, BLOCKS, BLOCK, GROUP, EVEN
            )
            loaded = loaded + ((tile, scales, offsets),)  # type: ignore[assignment]
        xs, x_sums = (), ()
        for j in gl.static_range(EIGHTS):
            if LONE:
                x = shared_operands(token[i], TOKEN_LAYOUT, TILE_LAYOUT, BLOCKS, BLOCK)
            else:
                token_ptr = x_ptr + gl.minimum(8 * j + eight, m - 1)[:, None, None] * (K // 2) + pairs
                x = loaded_operands(token_ptr + i * (COLUMNS // 2), blocks_left > i * BLOCKS, BLOCK, EVEN)
            some = token_sums[i] if LONE and BITS == 4 and SUMS > 0 else _sums_of(x, SUM, OF_SUM, SUMS)
            x_sums = x_sums + (some,)  # type: ignore[assignment]
            xs = xs + (x,)  # type: ignore[assignment]
        sums = _multiply_tile(loaded[i], xs, x_sums, sums, BITS, WIDEN, OF_WORD, MULTIPLY, OF_PRODUCT, SCALED)
    _end(
        sums, scale, row, m, n, factors_ptr, residual_ptr, bias_ptr, out_ptr, SPLITS, HAS_RESIDUAL, GATED, ACTIVATION,
        SIXTEENS, BLOCKS, OUT_LAYOUT,
    )  # fmt: skip


def packed_gemm(
    x: Tensor,  # [m, k] in 16 bits, contiguous, m up to MAX_TOKENS
    weight: Tensor,  # packed uint8 [n, k / 2], or packed int8 [n, k]; twice the rows with an activation
    scales: Tensor,  # fp16 or fp32 [n, groups], or of e2m1 uint8; twice the rows with an activation
    offsets: Tensor | None,  # as `scales`
    factors: Tensor | None,  # fp32 [n, 1], of e2m1; twice the rows with an activation
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
    packed = check_packed_product(
        x,
        weight,
        scales,
        offsets,
        factors,
        out,
        splits=splits,
        norm=norm,
        residual=residual,
        bias=bias,
        activation=activation,
    )
    (m, k), sides, has_offsets = x.shape, 1 if activation is None else 2, offsets is not None
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    assert rows > 0 and rows % MATRIX_ROWS == 0, f"{rows} rows of a program: a multiple of {MATRIX_ROWS} needed"
    bits, name, group = packed.bits, NAMES[x.dtype], packed.group_of_number
    sums = 4 if group < packed.block else 1
    excess = 0.0 if bits == 8 else EXCESS[name] + (0.0 if has_offsets else MIDDLE)
    is_scaled = packed.is_float or (m > ONCE and sums > 1)
    has_sums = not is_scaled and (bool(excess) or has_offsets)
    of_sum, of_product = operands(bits, sums, has_sums=has_sums, has_offsets=has_offsets)
    multiply = multiplying(name, bits, sums, excess, has_offsets=has_offsets, is_lone=m == 1)
    if is_scaled:
        multiply, of_product = adding(name, bits)
    if packed.is_float:
        widen, of_word = floating(name)
    elif is_scaled:
        widen = scaling(name, bits, has_offsets=has_offsets, numbers=1)
        of_word = constraints(bits, has_scales=True, has_offsets=has_offsets, numbers=1)
    else:
        widen, of_word = widening(name, bits), constraints(bits)
    n, outputs, tiles = weight.shape[0] // sides, rows // sides, -(-k // (packed.block * warps * splits))
    _packed_gemm_kernel[(-(-n // outputs), splits)](
        x_ptr=x if m == 1 else x.view(torch.int32),
        weight_ptr=weight.view(torch.int32),
        scales_ptr=scales.view(torch.uint16) if packed.is_float else scales,
        offsets_ptr=offsets,
        factors_ptr=factors,
        norm_ptr=x if norm is None else norm,
        residual_ptr=out if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        eps=eps,
        m=m,
        n=n,
        K=k,
        BITS=bits,
        GROUP=group,
        LONE=m == 1,
        SCALED=is_scaled,
        EIGHTS=-(-m // 8),
        SIXTEENS=rows // MATRIX_ROWS,
        SPLITS=splits,
        TILES=tiles,
        STAGES=min(stages, tiles),
        EVEN=n % outputs == 0 and k == tiles * splits * packed.block * warps,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        SUMS=sums if has_sums else 0,
        WIDEN=widen,
        OF_WORD=of_word,
        SUM=summing(name, bits, sums),
        OF_SUM=of_sum,
        MULTIPLY=multiply,
        OF_PRODUCT=of_product,
        TILE_LAYOUT=layouts(warps, bits).tile,
        TOKEN_LAYOUT=layouts(warps, bits).token,
        OUT_LAYOUT=layouts(warps, bits).out,
        num_warps=warps,
        maxnreg=MAX_REGISTERS.get(warps),
        launch_pdl=pdl,
    )
    return out
