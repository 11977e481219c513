"""Tiles of the products of experts: weights, tokens and sums, and how warps share them.

With splits, each warp of a program has its own columns of the rows, and a sum of its own. Tiles then have a first
dimension for the splits. This keeps more warps at work where few pairs make few programs.
"""

import triton
import triton.language as tl

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
    """Load a tile of rows: weights, or numbers of MXFP4."""
    inside = inside_n if WIDTH % STEP == 0 else inside_n & (columns < WIDTH)
    return tl.load(data_ptr + rows * WIDTH + columns, mask=inside, other=0, eviction_policy="evict_first")


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
def multiply(weights, factors, x, acc, PACKED: tl.constexpr, dtype: tl.constexpr):
    """Add the product of a tile of weights and a tile of tokens to `acc`."""
    if PACKED:
        values = mxfp4_values(weights, factors, dtype)
        for i in tl.static_range(4):
            acc = tl.dot(values[i], x[i], acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, x, acc, input_precision="ieee")
    return acc
