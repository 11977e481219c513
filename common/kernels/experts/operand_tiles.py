"""Tiles of the products of experts: weights, tokens and sums, and how warps share them.

FORM is that of the weights, one of `common.kernels.base.expert_operands.Form`. SCALE_ROWS rows of codes share a scale
for each of GROUPS groups of columns; both are 0 without codes. Codes are widened to the dtype of tokens. Scales of
several groups are applied to the sums of a tile, which lies in a group. Scales of whole rows of 8 bits are applied in
the end.

Of MXFP4 and INT4, a number of data has 16 bits and four elements, and a tile of numbers makes four tiles of elements.

With splits, each warp of a program has its own columns of the rows, and a sum of its own. Tiles then have a first
dimension for the splits. This keeps more warps at work where few pairs make few programs.
"""

import triton
import triton.language as tl

from common.kernels.base.codes import GROUP as GROUP_COLUMNS
from common.kernels.base.codes import elements_of
from common.kernels.experts.int4 import BLOCK as BLOCK_COLUMNS
from common.kernels.experts.int4 import QUARTER, int4_codes, int4_factors, int4_multiply, int4_sums
from common.kernels.experts.mxfp4 import mxfp4_factors, mxfp4_values, shifted_back

GROUP = tl.constexpr(GROUP_COLUMNS)


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
def whole_sums(sums, FORM: tl.constexpr, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """Return the sums `[BLOCK_N, PAIRS]` of all splits, of values as they are."""
    if SPLITS > 1:
        sums = tl.sum(sums, axis=0)
    return shifted_back(sums, dtype) if FORM == "mxfp4" else sums


@triton.jit
def weights_at(
    data_ptr,
    rows,  # as by `rows_of`, int64
    inside_n,  # as by `rows_of`
    columns,  # as by `columns_of`
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,  # columns of all splits
):
    """Load a tile of rows: weights, codes, or numbers."""
    inside = inside_n if WIDTH % STEP == 0 else inside_n & (columns < WIDTH)
    if data_ptr.dtype.element_ty == tl.float8e4nv:
        tile = tl.load(data_ptr + rows * WIDTH + columns, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(data_ptr + rows * WIDTH + columns, mask=inside, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def factors_of(
    scales_ptr,
    expert,
    first,  # row of the expert's matrix; of blocks of codes, the tile's rows share scales
    rows,  # of the tile, from `first` on, as by `rows_of`
    n,  # rows of an expert's matrix
    K: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the place of the scales, or of the offsets, of a tile's rows: a pointer, or one for each row."""
    if FORM == "plain" or scales_ptr is None:
        place_ptr = None
    elif FORM == "mxfp4":
        place_ptr = scales_ptr + (expert * n + first + rows) * (K // 32)
    elif SCALE_ROWS == 1:
        place_ptr = scales_ptr + (expert * n + first + rows) * GROUPS
    else:
        place_ptr = scales_ptr + (expert * tl.cdiv(n, SCALE_ROWS) + first // SCALE_ROWS) * GROUPS
    return place_ptr


@triton.jit
def factors_at(
    scale_ptr,  # as by `factors_of`, as is `offset_ptr`
    offset_ptr,
    inside_n,  # as by `rows_of`
    start,  # of the tile, in numbers of data of a row
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # numbers of data of a split
    SPLITS: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load the factors of a tile of weights; past the end of a row, any."""
    if FORM == "mxfp4":
        groups = start // 8 + columns_of(BLOCK // 8, SPLITS)
        scales = tl.load(scale_ptr + groups, mask=inside_n & (groups < K // 32), other=64)
        factors = mxfp4_factors(scales, dtype)
    elif FORM == "int4":
        blocks = start // QUARTER + columns_of(1, SPLITS)
        factors = int4_factors(scale_ptr, offset_ptr, blocks, inside_n, K // BLOCK_COLUMNS, GROUPS)
    elif FORM == "bytes":
        group = start // GROUP
        inside = inside_n & (group < GROUPS) if SCALE_ROWS == 1 else group < GROUPS
        factors = tl.load(scale_ptr + group, mask=inside, other=0.0)
    else:
        factors = 0
    return factors


@triton.jit
def tokens_at(x_ptr, row_starts, columns, inside, FORM: tl.constexpr):
    """Load a tile of tokens, with a column for each pair; beside numbers of four elements, the four tiles of these.

    Args:
        row_starts: as by `lanes_of`.
        columns: as by `columns_down`, of the numbers of data.
        inside: of the shape of the tile.
    """
    if FORM == "int4":
        first_ptr = x_ptr + row_starts + (columns // QUARTER * BLOCK_COLUMNS + columns % QUARTER)
        x = (
            tl.load(first_ptr, mask=inside, other=0.0),
            tl.load(first_ptr + QUARTER, mask=inside, other=0.0),
            tl.load(first_ptr + 2 * QUARTER, mask=inside, other=0.0),
            tl.load(first_ptr + 3 * QUARTER, mask=inside, other=0.0),
        )
    elif FORM != "mxfp4":
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
def sums_at(
    x,
    factors,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the sums of a tile of tokens that offsets are factors of; () without offsets."""
    sums = ()
    if HAS_OFFSETS:
        sums = int4_sums(x, factors, (SPLITS, ROWS, QUARTER) if SPLITS > 1 else (ROWS, QUARTER), dtype)
    return sums


@triton.jit
def multiply(
    weights,
    factors,
    x,
    x_sums,  # as by `sums_at`
    acc,
    FORM: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Add the product of a tile of weights and a tile of tokens to `acc`."""
    if FORM == "mxfp4":
        values = mxfp4_values(weights, factors, dtype)
        for i in tl.static_range(4):
            acc = tl.dot(values[i], x[i], acc, input_precision="ieee")
    elif FORM == "int4":
        acc = int4_multiply(int4_codes(weights, not HAS_OFFSETS, dtype), factors, x, x_sums, acc, not HAS_OFFSETS)
    elif FORM == "bytes" and GROUPS > 1:
        acc += tl.dot(elements_of(weights, dtype), x, input_precision="ieee") * factors
    elif FORM == "bytes":
        acc = tl.dot(elements_of(weights, dtype), x, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, x, acc, input_precision="ieee")
    return acc
