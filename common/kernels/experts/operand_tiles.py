"""Tiles of the products of experts: weights, tokens and sums, and how warps share them.

Weights are plain, in MXFP4 (PACKED), or codes of 8 bits. SCALE_ROWS rows of codes share a scale for each of GROUPS
groups of columns; both are 0 without codes. Codes are widened to the dtype of tokens. Scales of several groups are
applied to the sums of a tile, which lies in a group. Scales of whole rows are applied in the end.

With splits, each warp of a program has its own columns of the rows, and a sum of its own. Tiles then have a first
dimension for the splits. This keeps more warps at work where few pairs make few programs.
"""

import triton
import triton.language as tl

from common.kernels.base.codes import elements_of
from common.kernels.experts.mxfp4 import mxfp4_factors, mxfp4_values, shifted_back


@triton.jit
def rows_of(values, SPLITS: tl.constexpr):
    """Return `[BLOCK_N]` values as `[BLOCK_N, 1]`; with splits, `[1, BLOCK_N, 1]`."""
    return values[None, :, None] if SPLITS > 1 else values[:, None]


@triton.jit
def lanes_of(values, SPLITS: tl.constexpr):
    """Return `[PAIRS]` values as `[1, PAIRS]`; with splits, `[1, 1, PAIRS]`."""
    return values[None, None, :] if SPLITS > 1 else values[None, :]


@triton.jit
def columns_of(BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the columns of a tile of weights: `[1, BLOCK]`; with splits, `[SPLITS, 1, BLOCK]`."""
    columns = tl.arange(0, BLOCK)
    return (tl.arange(0, SPLITS) * BLOCK)[:, None, None] + columns[None, None, :] if SPLITS > 1 else columns[None, :]


@triton.jit
def columns_down(BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the columns of a tile of weights as rows of x: `[BLOCK, 1]`; with splits, `[SPLITS, BLOCK, 1]`."""
    columns = tl.arange(0, BLOCK)
    return (tl.arange(0, SPLITS) * BLOCK)[:, None, None] + columns[None, :, None] if SPLITS > 1 else columns[:, None]


@triton.jit
def no_sums(BLOCK_N: tl.constexpr, PAIRS: tl.constexpr, SPLITS: tl.constexpr):
    """Return zeros `[BLOCK_N, PAIRS]`; with splits, `[SPLITS, BLOCK_N, PAIRS]`."""
    return tl.zeros((SPLITS, BLOCK_N, PAIRS) if SPLITS > 1 else (BLOCK_N, PAIRS), tl.float32)


@triton.jit
def whole_sums(sums, PACKED: tl.constexpr, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Return the sums `[BLOCK_N, PAIRS]` of all splits, of values as they are."""
    if SPLITS > 1:
        sums = tl.sum(sums, axis=0)
    return shifted_back(sums, dtype) if PACKED else sums


@triton.jit
def weights_at(
    data_ptr,
    rows,  # as by `rows_of`, int64
    inside_n,  # as by `rows_of`
    columns,  # as by `columns_of`
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,  # columns of all splits
):
    """Load a tile of rows: weights, codes, or numbers of MXFP4."""
    inside = inside_n if WIDTH % STEP == 0 else inside_n & (columns < WIDTH)
    if data_ptr.dtype.element_ty == tl.float8e4nv:
        tile = tl.load(data_ptr + rows * WIDTH + columns, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(data_ptr + rows * WIDTH + columns, mask=inside, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def factors_at(
    scales_ptr,
    rows,  # as by `rows_of`, int64
    inside_n,  # as by `rows_of`
    groups,  # as by `columns_of`
    WIDTH: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the factors of a tile of MXFP4; past the end of a row, any."""
    return mxfp4_factors(tl.load(scales_ptr + rows * WIDTH + groups, mask=inside_n & (groups < WIDTH), other=64), dtype)


@triton.jit
def scales_of(
    scales_ptr,
    expert,
    first,  # row of the expert's matrix; the tile's rows share scales unless SCALE_ROWS is 1
    rows,  # of the tile, from `first` on
    n,  # rows of an expert's matrix
    SCALE_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the place of the scales of a tile's rows: a pointer, or one for each row, `[BLOCK_N, 1]`."""
    if SCALE_ROWS == 1:
        place_ptr = scales_ptr + (expert * n + first + rows)[:, None] * GROUPS
    else:
        place_ptr = scales_ptr + (expert * tl.cdiv(n, SCALE_ROWS) + first // SCALE_ROWS) * GROUPS
    return place_ptr


@triton.jit
def scales_at(place_ptr, inside_n, group, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales of a group of columns; past the last group, 0."""
    if SCALE_ROWS == 1:
        scales = tl.load(place_ptr + group, mask=inside_n & (group < GROUPS), other=0.0)
    else:
        scales = tl.load(place_ptr + group, mask=group < GROUPS, other=0.0)
    return scales


@triton.jit
def tokens_at(x_ptr, row_starts, columns, inside, PACKED: tl.constexpr):
    """Load a tile of tokens, with a column for each pair; beside PACKED weights, the four tiles of their values.

    Args:
        row_starts: as by `lanes_of`.
        columns: as by `columns_down`, of x; beside PACKED weights, of four columns of x each.
        inside: of the shape of the tile.
    """
    if not PACKED:
        x = tl.load(x_ptr + row_starts + columns, mask=inside, other=0.0)
    elif x_ptr.dtype.element_ty.primitive_bitwidth == 16:
        four_ptr = x_ptr.to(tl.pointer_type(tl.uint64)) + row_starts // 4
        four = tl.load(four_ptr + columns, mask=inside, other=0)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        x = (
            four.to(tl.uint16).to(dtype, bitcast=True),
            (four >> 16).to(tl.uint16).to(dtype, bitcast=True),
            (four >> 32).to(tl.uint16).to(dtype, bitcast=True),
            (four >> 48).to(tl.uint16).to(dtype, bitcast=True),
        )
    else:
        first_ptr = x_ptr + row_starts + 4 * columns
        x = (
            tl.load(first_ptr, mask=inside, other=0.0),
            tl.load(first_ptr + 1, mask=inside, other=0.0),
            tl.load(first_ptr + 2, mask=inside, other=0.0),
            tl.load(first_ptr + 3, mask=inside, other=0.0),
        )
    return x


@triton.jit
def multiply(weights, factors, x, acc, PACKED: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Add the product of a tile of weights and a tile of tokens to `acc`."""
    if PACKED:
        values = mxfp4_values(weights, factors, dtype)
        for i in tl.static_range(4):
            acc = tl.dot(values[i], x[i], acc, input_precision="ieee")
    elif GROUPS > 1:
        acc += tl.dot(elements_of(weights, dtype), x, input_precision="ieee") * factors
    elif GROUPS == 1:
        acc = tl.dot(elements_of(weights, dtype), x, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, x, acc, input_precision="ieee")
    return acc
