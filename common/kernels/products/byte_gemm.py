"""Product of a few tokens and a matrix of codes of 8 bits in groups, tokens as they are, with neighbours fused in.

A warp reads a block: 64 bytes of each of 8 rows at once, 16 bytes a thread. With 8 more rows, these are operands of the
matrix unit in registers, because a product may add up columns in any order. Scales are applied to sums of groups, or to
codes where a group is narrower than a step of the unit. Programs of several warps divide K among the warps.

As in `gemv`, the first tiles of weights are on the way before the wait for the predecessor. The norm of a lone token is
fused as there: its scale is applied to finished sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_ending
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.wide_codes import bytes_of_numbers, check_codes_alone

MAX_TOKENS = 64
PROGRAM_ROWS = (16, 32, 64)
NORM_COLUMNS = 1024  # of a token, whose squares are added up at once
NUMBERS = tl.constexpr(32)  # of 16 bits in a block of a row


@triton.jit
def _load_tile(ptr, inside, blocks, end, INDEX: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr):
    """Load the tile INDEX of numbers `[ROWS / 8, WARPS, 8, NUMBERS]`, a block a warp; read once, so evicted first.

    Blocks from `end` on are zeros. EVEN: there are none, and all rows are inside.
    """
    ptr += INDEX * WARPS * NUMBERS
    if EVEN:
        tile = tl.load(ptr, eviction_policy="evict_first")
    else:
        mask = inside & (blocks + INDEX * WARPS < end)[None, :, None, None]
        tile = tl.load(ptr, mask=mask, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_tiles(ptr, inside, blocks, end, COUNT: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr):
    """Load the first COUNT tiles, as a tuple; all are on the way before the first is needed."""
    tiles = (_load_tile(ptr, inside, blocks, end, 0, WARPS, EVEN),)
    for i in tl.static_range(1, COUNT):
        tiles = tiles + (_load_tile(ptr, inside, blocks, end, i, WARPS, EVEN),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _load_tokens(x_ptr, norm_ptr, inside, HAS_NORM: tl.constexpr):
    """Load four eights of columns of the tokens, `[BLOCK_M / 8, WARPS, 8, 32]`, times the norm's weight."""
    x = tl.load(x_ptr, mask=inside, other=0.0)
    if HAS_NORM:
        norm = tl.load(norm_ptr, mask=inside, other=0.0)
        x = (x.to(tl.float32) * norm.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _operands_of(x, WARPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the tokens beside the first and the second code of four eights, both `[WARPS, 16, BLOCK_M]`."""
    x = tl.permute(tl.reshape(x, (BLOCK_M // 8, WARPS, 8, 4, 2, 2, 2)), (1, 4, 3, 5, 0, 2, 6))
    first, second = tl.split(x)
    return tl.reshape(first, (WARPS, 16, BLOCK_M)), tl.reshape(second, (WARPS, 16, BLOCK_M))


@triton.jit
def _halves_of(tile, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the numbers of the two halves of blocks, both `[WARPS, ROWS, 16]`."""
    tile = tl.permute(tl.reshape(tile, (ROWS // 8, WARPS, 8, 4, 2, 2, 2)), (1, 0, 2, 5, 3, 6, 4))
    first, second = tl.split(tile)
    return tl.reshape(first, (WARPS, ROWS, 16)), tl.reshape(second, (WARPS, ROWS, 16))


@triton.jit
def _codes_of(numbers, scales, offsets, dtype: tl.constexpr, NARROW: tl.constexpr, CENTERED: tl.constexpr):
    """Return the two codes of each number, as tiles `[WARPS, ROWS, 16]`; with scales and offsets if NARROW."""
    first, second = bytes_of_numbers(numbers, dtype)
    if NARROW:
        first *= scales
        second *= scales
        if not CENTERED:
            first += offsets
            second += offsets
    return first, second


@triton.jit
def _load_sixteens(ptr, inside, dtype: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Load a number for each of four 16s of columns, `[WARPS, ROWS, 4]`, and lay it beside codes of these columns."""
    each = (tl.load(ptr) if EVEN else tl.load(ptr, mask=inside, other=0.0)).to(dtype)
    each = tl.broadcast_to(each[:, :, None, :, None], (WARPS, ROWS, 2, 4, 2))
    return tl.reshape(each, (WARPS, ROWS, 16))


@triton.jit
def _of_rows(ptr, inside, STRIDE: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Load a number for each row, `[WARPS, ROWS]` fp32, from where it is for the first 16 rows.

    16 rows at a time, because the compiler loads so few numbers straight to where they are needed.
    """
    each = _of_few(ptr, inside, 0, STRIDE, EVEN)
    if ROWS == 32:
        each = tl.join(each, _of_few(ptr, inside, 1, STRIDE, EVEN))
        each = tl.reshape(tl.permute(each, (0, 2, 1)), (WARPS, ROWS))
    if ROWS == 64:
        even = tl.join(each, _of_few(ptr, inside, 2, STRIDE, EVEN))
        odd = tl.join(_of_few(ptr, inside, 1, STRIDE, EVEN), _of_few(ptr, inside, 3, STRIDE, EVEN))
        each = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (WARPS, ROWS))
    return each.to(tl.float32)


@triton.jit
def _of_few(ptr, rows_left, INDEX: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr):
    """Load a number for each of 16 rows, those from 16 * INDEX on; `rows_left` counts rows from the first on."""
    ptr += INDEX * STRIDE
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=rows_left > INDEX * 16, other=0.0)


@triton.jit
def _add_scaled(
    acc, part, x_sums, scale_ptr, offset_ptr, rows_left, STRIDE: tl.constexpr, EVEN: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """Add sums of codes of a group, scaled, to `acc [WARPS, ROWS, BLOCK_M]`, and the tokens' sums by the offset."""
    WARPS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    scales = _of_rows(scale_ptr, rows_left, STRIDE, EVEN, WARPS, ROWS)
    acc += part * scales[:, :, None]
    if not CENTERED:
        offsets = _of_rows(offset_ptr, rows_left, STRIDE, EVEN, WARPS, ROWS)
        sums = tl.broadcast_to(x_sums[:, None, :, :], (WARPS, ROWS // 16, 16, acc.shape[2]))
        acc += tl.reshape(sums, acc.shape) * offsets[:, :, None]
    return acc


@triton.jit(do_not_specialize=["m"])
def _byte_gemm_kernel(
    x_ptr,  # [m, K], contiguous
    weight_ptr,  # [n, K / 2] numbers of 16 bits; twice the rows if GATED: gate, then up
    scales_ptr,  # [n, K / GROUP]; twice the rows if GATED
    offsets_ptr,  # as scales_ptr, or None
    norm_ptr,  # [K], if HAS_NORM
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    eps,
    m,
    n,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    BLOCK: tl.constexpr,  # columns of a block
    STEP: tl.constexpr,  # columns of a block that share a scale
    BLOCK_M: tl.constexpr,  # at least m
    ROWS: tl.constexpr,  # outputs of a program
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,  # of a program
    STAGES: tl.constexpr,  # tiles on the way at once, and of a round; at most TILES
    ROUNDS: tl.constexpr,  # enough for all tiles
    EVEN_N: tl.constexpr,  # ROWS divides n
    HAS_NORM: tl.constexpr,  # of a lone token
    NORM_BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    """Grid: (cdiv(n, ROWS), SPLITS). A program computes ROWS outputs of all tokens, over a part of K."""
    WARPS: tl.constexpr = num_warps
    BLOCKS: tl.constexpr = K // BLOCK
    WIDTH: tl.constexpr = BLOCKS * NUMBERS
    GROUPS: tl.constexpr = K // GROUP
    NARROW: tl.constexpr = STEP < 64
    CENTERED: tl.constexpr = offsets_ptr is None
    EVEN_K: tl.constexpr = TILES * SPLITS * WARPS == BLOCKS and ROUNDS * STAGES == TILES
    EVEN: tl.constexpr = EVEN_N and EVEN_K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS
    blocks = tl.program_id(1) * (TILES * WARPS) + tl.arange(0, WARPS)
    end = min((tl.program_id(1) + 1) * (TILES * WARPS), BLOCKS)
    tile_rows = row + tl.arange(0, ROWS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    numbers = blocks[None, :, None, None] * NUMBERS + tl.arange(0, NUMBERS)[None, None, None, :]
    tile_ptr = weight_ptr + tile_rows[:, None, :, None].to(tl.int64) * WIDTH + numbers
    up_ptr = tile_ptr + n.to(tl.int64) * WIDTH
    inside_tile = (tile_rows < n)[:, None, :, None]
    tiles = _load_tiles(tile_ptr, inside_tile, blocks, end, STAGES, WARPS, EVEN)
    up_tiles = tiles
    if GATED:
        up_tiles = _load_tiles(up_ptr, inside_tile, blocks, end, STAGES, WARPS, EVEN)
    wait_for_predecessor(PDL)

    squares = tl.zeros((NORM_BLOCK,), tl.float32)
    if HAS_NORM:
        for start in tl.static_range(0, K, NORM_BLOCK):
            columns = start + tl.arange(0, NORM_BLOCK)
            some = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            squares += some * some
    tokens = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, 32) // 8 * 16 + tl.arange(0, 32) % 8
    columns = blocks[None, :, None, None] * BLOCK + columns[None, None, None, :]
    tile_tokens = (tl.arange(0, BLOCK_M // 8)[:, None] * 8 + tl.arange(0, 8)[None, :])[:, None, :, None]
    token_ptr = x_ptr + tile_tokens * K + columns
    token_norm_ptr = norm_ptr + tile_tokens * 0 + columns
    inside_m = tile_tokens < m
    rows = row + tl.arange(0, ROWS)
    few_rows = row + tl.arange(0, 16)
    group = few_rows[None, :].to(tl.int64) * GROUPS
    if GROUP <= BLOCK:
        group += (blocks * (BLOCK // GROUP))[:, None]
    if NARROW:
        group = rows[None, :, None].to(tl.int64) * GROUPS + (blocks * (BLOCK // GROUP))[:, None, None]
        group += (tl.arange(0, 4) * 16 // GROUP)[None, None, :]
    scale_ptr = scales_ptr + group
    offset_ptr = scale_ptr if CENTERED else offsets_ptr + group
    up_scale_ptr, up_offset_ptr = scale_ptr + n * GROUPS, offset_ptr + n * GROUPS
    ones = tl.full((WARPS, 16, 16), 1.0, dtype)
    no_sums = tl.zeros((WARPS, 16, BLOCK_M), tl.float32)
    zeros = tl.zeros((WARPS, ROWS, BLOCK_M), tl.float32)
    acc, up_acc = zeros, zeros
    for first in tl.range(0, ROUNDS * STAGES, STAGES, num_stages=1):
        later, up_later = (), ()
        for slot in tl.static_range(STAGES):
            i = first + slot
            halves = _halves_of(tiles[slot], WARPS, ROWS)
            up_halves = halves
            if GATED:
                up_halves = _halves_of(up_tiles[slot], WARPS, ROWS)
            is_block = blocks + i * WARPS < end
            inside_x = inside_m if EVEN_K else inside_m & is_block[None, :, None, None]
            rows_left = tl.where(is_block[:, None], (n - few_rows)[None, :], 0)
            scales, offsets, up_scales, up_offsets = 0.0, 0.0, 0.0, 0.0
            if NARROW:
                inside = (rows < n)[None, :, None] & is_block[:, None, None]
                at = i * WARPS * (BLOCK // GROUP)
                scales = _load_sixteens(scale_ptr + at, inside, dtype, EVEN, WARPS, ROWS)
                if not CENTERED:
                    offsets = _load_sixteens(offset_ptr + at, inside, dtype, EVEN, WARPS, ROWS)
                if GATED:
                    up_scales = _load_sixteens(up_scale_ptr + at, inside, dtype, EVEN, WARPS, ROWS)
                    if not CENTERED:
                        up_offsets = _load_sixteens(up_offset_ptr + at, inside, dtype, EVEN, WARPS, ROWS)
            part, up_part, x_sums = zeros, zeros, no_sums
            for p in tl.static_range(2):
                codes = _codes_of(halves[p], scales, offsets, dtype, NARROW, CENTERED)
                up_codes = codes
                if GATED:
                    up_codes = _codes_of(up_halves[p], up_scales, up_offsets, dtype, NARROW, CENTERED)
                at = i * WARPS * BLOCK + p * 8
                x = _load_tokens(token_ptr + at, token_norm_ptr + at, inside_x, HAS_NORM)
                x = _operands_of(x, WARPS, BLOCK_M)
                for j in tl.static_range(2):
                    if NARROW:
                        acc = tl.dot(codes[j], x[j], acc, input_precision="ieee")
                        if GATED:
                            up_acc = tl.dot(up_codes[j], x[j], up_acc, input_precision="ieee")
                    else:
                        part = tl.dot(codes[j], x[j], part, input_precision="ieee")
                        if GATED:
                            up_part = tl.dot(up_codes[j], x[j], up_part, input_precision="ieee")
                        if not CENTERED:
                            x_sums = tl.dot(ones, x[j], x_sums, input_precision="ieee")
            if not NARROW:
                place = i * WARPS
                if GROUP > BLOCK:
                    place = ((blocks + i * WARPS) * BLOCK // GROUP)[:, None]
                acc = _add_scaled(
                    acc, part, x_sums, scale_ptr + place, offset_ptr + place, rows_left, 16 * GROUPS, EVEN, CENTERED
                )
                if GATED:
                    up_acc = _add_scaled(
                        up_acc, up_part, x_sums, up_scale_ptr + place, up_offset_ptr + place, rows_left, 16 * GROUPS,
                        EVEN, CENTERED,
                    )  # fmt: skip
            if ROUNDS > 1:
                at, left = first * (WARPS * NUMBERS), end - first * WARPS
                tile = _load_tile(tile_ptr + at, inside_tile, blocks, left, slot + STAGES, WARPS, False)
                later += (tile,)  # type: ignore[assignment]
                if GATED:
                    tile = _load_tile(up_ptr + at, inside_tile, blocks, left, slot + STAGES, WARPS, False)
                    up_later += (tile,)  # type: ignore[assignment]
        if ROUNDS > 1:
            tiles = later
            up_tiles = up_later if GATED else later

    y = tl.sum(acc, axis=0)
    up = y
    if GATED:
        up = tl.sum(up_acc, axis=0)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
        up *= scale
    inside_n = rows < n
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=inside_n & (tl.program_id(1) == 0), other=0.0)  # counted once
        y += bias.to(tl.float32)[:, None]
    elements = tokens[None, :].to(tl.int64) * n + rows[:, None]
    inside_out = inside_n[:, None] & (tokens < m)[None, :]
    if SPLITS > 1:
        tl.store(out_ptr + tl.program_id(1).to(tl.int64) * m * n + elements, y, mask=inside_out)
    else:
        if GATED:
            y = gated(y, up, ACTIVATION)
        if HAS_RESIDUAL:
            y += tl.load(residual_ptr + elements, mask=inside_out, other=0.0).to(tl.float32)
        tl.store(out_ptr + elements, y.to(out_ptr.dtype.element_ty), mask=inside_out)


def byte_gemm(
    x: Tensor,  # [m, k], contiguous, m up to MAX_TOKENS
    weight: Tensor,  # int8 [n, k]; twice the rows with an activation
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

    With `splits`, write parts, the first with the bias. A program has `rows` outputs, in 16s, and `warps` warps, each
    with 64 bytes of a row of a tile. Up to `stages` tiles are on the way at once, the first during the wait for the
    predecessor.
    """
    (m, k), n = x.shape, weight.shape[0] // (1 if activation is None else 2)
    assert weight.dtype == torch.int8, f"weight of {weight.dtype}: signed bytes needed"
    layout = check_codes_alone(weight, scales, offsets)
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    assert x.is_contiguous() and layout.num_columns == k, f"x {tuple(x.shape)}, {layout.num_columns} columns: alike"
    shape = (splits, m, n) if splits > 1 else (m, n)
    assert out.shape == shape and out.is_contiguous(), f"out {tuple(out.shape)}: contiguous {shape} needed"
    assert rows in PROGRAM_ROWS, f"{rows} rows of a program: one of {PROGRAM_ROWS} needed"
    assert splits == 1 or (residual is None and activation is None), f"{splits} splits: parts are sums alone"
    assert norm is None or (norm.shape == (k,) and m == splits == 1), f"{m} tokens: norms of one, [{k}], without splits"
    assert residual is None or residual.shape == (m, n), f"residual {tuple(residual.shape)}: ({m}, {n}) needed"
    check_ending(n, bias, activation)
    tiles = triton.cdiv(k // layout.block, warps * splits)
    rounds = triton.cdiv(tiles, stages)
    _byte_gemm_kernel[(triton.cdiv(n, rows), splits)](
        x_ptr=x,
        weight_ptr=weight.view(torch.uint16),
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
        GROUP=layout.group,
        BLOCK=layout.block,
        STEP=min(layout.group, layout.block),
        BLOCK_M=max(8, triton.next_power_of_2(m)),
        ROWS=rows,
        SPLITS=splits,
        TILES=tiles,
        STAGES=triton.cdiv(tiles, rounds),
        ROUNDS=rounds,
        EVEN_N=n % rows == 0,
        HAS_NORM=norm is not None,
        NORM_BLOCK=min(NORM_COLUMNS, triton.next_power_of_2(k)),
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
