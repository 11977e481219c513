"""Tiles of codes and tokens as operands of the matrix unit, without an exchange between threads.

A warp reads a block: 64 bytes of each of 8 rows at once, 16 bytes a thread. With 8 more rows, these are the operands
of a thread, because a product may add up columns in any order.
"""

import triton
import triton.language as tl

from common.kernels.products.wide_codes import bytes_of_numbers, nibbles_of_numbers

NUMBERS = tl.constexpr(32)  # of 16 bits in a block of a row


@triton.jit
def load_tile(ptr, inside, blocks, end, INDEX: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr):
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
def load_tiles(ptr, inside, blocks, end, COUNT: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr):
    """Load the first COUNT tiles, as a tuple; all are on the way before the first is needed."""
    tiles = (load_tile(ptr, inside, blocks, end, 0, WARPS, EVEN),)
    for i in tl.static_range(1, COUNT):
        tiles = tiles + (load_tile(ptr, inside, blocks, end, i, WARPS, EVEN),)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_tokens(x_ptr, norm_ptr, inside, HAS_NORM: tl.constexpr):
    """Load four eights of columns of the tokens, `[BLOCK_M / 8, WARPS, 8, 32]`, times the norm's weight."""
    x = tl.load(x_ptr, mask=inside, other=0.0)
    if HAS_NORM:
        norm = tl.load(norm_ptr, mask=inside, other=0.0)
        x = (x.to(tl.float32) * norm.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def operands_of(x, PACKED: tl.constexpr, WARPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the tokens beside the first and the second code of four eights, both `[WARPS, 16, BLOCK_M]`."""
    x = tl.reshape(x, (BLOCK_M // 8, WARPS, 8, 4, 2, 2, 2))
    x = tl.permute(x, (1, 5, 3, 6, 0, 2, 4)) if PACKED else tl.permute(x, (1, 4, 3, 5, 0, 2, 6))
    first, second = tl.split(x)
    return tl.reshape(first, (WARPS, 16, BLOCK_M)), tl.reshape(second, (WARPS, 16, BLOCK_M))


@triton.jit
def halves_of(tile, PACKED: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the numbers of the two halves of blocks, both `[WARPS, ROWS, 16]`."""
    tile = tl.reshape(tile, (ROWS // 8, WARPS, 8, 4, 2, 2, 2))
    tile = tl.permute(tile, (1, 0, 2, 4, 3, 6, 5)) if PACKED else tl.permute(tile, (1, 0, 2, 5, 3, 6, 4))
    first, second = tl.split(tile)
    return tl.reshape(first, (WARPS, ROWS, 16)), tl.reshape(second, (WARPS, ROWS, 16))


@triton.jit
def codes_of(
    numbers, scales, offsets, dtype: tl.constexpr, PACKED: tl.constexpr, NARROW: tl.constexpr, CENTERED: tl.constexpr
):
    """Return the four or two codes of each number, as tiles `[WARPS, ROWS, 16]`; with scales and offsets if NARROW."""
    if PACKED:
        codes = nibbles_of_numbers(numbers, dtype, CENTERED)
    else:
        codes = bytes_of_numbers(numbers, dtype)
        if NARROW:
            codes = codes[0] * scales, codes[1] * scales
            if not CENTERED:
                codes = codes[0] + offsets, codes[1] + offsets
    return codes


@triton.jit
def load_sixteens(ptr, inside, dtype: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
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
def add_scaled(
    acc, part, x_sums, scale_ptr, offset_ptr, rows_left, STRIDE: tl.constexpr, EVEN: tl.constexpr,
    CENTERED: tl.constexpr, EXCESS: tl.constexpr,
):  # fmt: skip
    """Add sums of codes of a group, scaled, to `acc [WARPS, ROWS, BLOCK_M]`, and the tokens' sums by the offset.

    Codes without a center are too large by EXCESS.
    """
    WARPS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    scales = _of_rows(scale_ptr, rows_left, STRIDE, EVEN, WARPS, ROWS)
    acc += part * scales[:, :, None]
    if not CENTERED:
        offsets = _of_rows(offset_ptr, rows_left, STRIDE, EVEN, WARPS, ROWS) - EXCESS * scales
        sums = tl.broadcast_to(x_sums[:, None, :, :], (WARPS, ROWS // 16, 16, acc.shape[2]))
        acc += tl.reshape(sums, acc.shape) * offsets[:, :, None]
    return acc
