"""Products of tokens and the matrices of their experts: gate and up with the activation, and down with the weights.

A program has a tile of pairs of the same expert. So a part of the expert's matrix is read once for all pairs. A product
has tall tiles of weights; pairs are the narrow side. Results of a pair lie in rows of the pair alone, so no program
adds to the result of another. The reader of these rows adds in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.codes import GROUP as GROUP_COLUMNS
from common.kernels.base.expert_operands import PACKED, ExpertMatrix, Form, Groups, Routing
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.experts.int4 import BLOCK as BLOCK_COLUMNS
from common.kernels.experts.operand_tiles import (
    columns_down,
    columns_of,
    factors_at,
    factors_of,
    lanes_of,
    multiply,
    no_sums,
    rows_of,
    sums_at,
    tokens_at,
    weights_at,
    whole_sums,
)
from common.kernels.experts.tiles import ExpertTiles


@triton.jit
def _tile_of(experts_ptr, tiles_ptr, num_tiles, LONE: tl.constexpr):
    """Return expert, first place and end of the program's tile; of a lone token, each pair is a tile."""
    tile = tl.program_id(1)
    if LONE:
        return tl.load(experts_ptr + tile).to(tl.int64), tile, tile + 1
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    return expert, tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)


@triton.jit
def _pairs_at(order_ptr, places, inside, LONE: tl.constexpr):
    """Return the pairs at places of the order."""
    if LONE:
        return places
    return tl.load(order_ptr + places, mask=inside, other=0)


@triton.jit(do_not_specialize=["num_tiles"])
def _experts_gate_up_kernel(
    x_ptr,  # [m, K], contiguous
    data_ptr,  # [num_experts, 2 * n, K], gate first; of mxfp4 and int4 [.., K / 4] uint16
    scales_ptr,  # [num_experts, cdiv(2 * n, SCALE_ROWS), GROUPS]; of mxfp4 [num_experts, 2 * n, K / 32] uint8
    offsets_ptr,  # as the scales, of int4; or None
    bias_ptr,  # [num_experts, 2 * n], if HAS_BIAS
    experts_ptr,  # [num_pairs] int32, if LONE
    order_ptr,  # [num_pairs] int32, unless LONE
    tiles_ptr,  # [3, num_tiles] int32, unless LONE
    out_ptr,  # [num_pairs, n], in the order of pairs
    num_tiles,
    n,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # pairs of a token
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,  # warps that share the columns of a row
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,  # of data, as `Form` has it
    SCALE_ROWS: tl.constexpr,  # of codes, that share scales; 0 without codes
    GROUPS: tl.constexpr,  # of columns of codes, with a scale each; 0 without codes
    LONE: tl.constexpr,  # one token: every pair is a tile
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), num_tiles). A program computes BLOCK_N outputs of a tile of pairs."""
    VALUES: tl.constexpr = 4 if FORM == "mxfp4" or FORM == "int4" else 1  # in a number of data
    WIDTH: tl.constexpr = K // VALUES
    BLOCK: tl.constexpr = BLOCK_K // VALUES
    STEP: tl.constexpr = BLOCK * SPLITS
    columns, places_k = columns_of(BLOCK, SPLITS), columns_down(BLOCK, SPLITS)
    lanes = tl.arange(0, PAIRS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = rows_of(rows < n, SPLITS)
    wait_for_predecessor(PDL)
    expert, begin, end = _tile_of(experts_ptr, tiles_ptr, num_tiles, LONE)
    if (expert < 0) | (begin >= end):
        return
    places = begin + lanes
    inside = places < end
    tokens = (_pairs_at(order_ptr, places, inside, LONE) // SLOTS).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    of_tile = rows_of(rows - first, SPLITS)
    gate_rows = expert * 2 * n + rows_of(rows, SPLITS)
    up_rows = gate_rows + n
    gate, up = no_sums(BLOCK_N, PAIRS, SPLITS), no_sums(BLOCK_N, PAIRS, SPLITS)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    gate_ptr = factors_of(scales_ptr, expert, first, of_tile, 2 * n, K, FORM, SCALE_ROWS, GROUPS)
    up_ptr = factors_of(scales_ptr, expert, n + first, of_tile, 2 * n, K, FORM, SCALE_ROWS, GROUPS)
    gate_offset_ptr = factors_of(offsets_ptr, expert, first, of_tile, 2 * n, K, FORM, SCALE_ROWS, GROUPS)
    up_offset_ptr = factors_of(offsets_ptr, expert, n + first, of_tile, 2 * n, K, FORM, SCALE_ROWS, GROUPS)
    # Loaded a tile ahead, because rows of factors are too narrow for the asynchronous copies of the rest.
    gate_factors = factors_at(gate_ptr, gate_offset_ptr, inside_n, 0, K, BLOCK, SPLITS, FORM, SCALE_ROWS, GROUPS, dtype)
    up_factors = factors_at(up_ptr, up_offset_ptr, inside_n, 0, K, BLOCK, SPLITS, FORM, SCALE_ROWS, GROUPS, dtype)
    for start in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        is_inside = lanes_of(inside, SPLITS) & (start + places_k < WIDTH)
        x = tokens_at(x_ptr, lanes_of(tokens * K, SPLITS), start + places_k, is_inside, FORM)
        x_sums = sums_at(x, gate_factors, BLOCK_N, SPLITS, HAS_OFFSETS, dtype)
        gates = weights_at(data_ptr, gate_rows, inside_n, start + columns, WIDTH, STEP)
        gate = multiply(gates, gate_factors, x, x_sums, gate, FORM, GROUPS, HAS_OFFSETS, dtype)
        ups = weights_at(data_ptr, up_rows, inside_n, start + columns, WIDTH, STEP)
        up = multiply(ups, up_factors, x, x_sums, up, FORM, GROUPS, HAS_OFFSETS, dtype)
        if FORM != "bytes" or GROUPS > 1:
            ahead = start + STEP
            gate_factors = factors_at(
                gate_ptr, gate_offset_ptr, inside_n, ahead, K, BLOCK, SPLITS, FORM, SCALE_ROWS, GROUPS, dtype
            )
            up_factors = factors_at(
                up_ptr, up_offset_ptr, inside_n, ahead, K, BLOCK, SPLITS, FORM, SCALE_ROWS, GROUPS, dtype
            )
    if FORM == "bytes" and GROUPS == 1:
        gate, up = gate * gate_factors, up * up_factors
    gate, up = whole_sums(gate, FORM, SPLITS, dtype), whole_sums(up, FORM, SPLITS, dtype)
    out_rows, is_row = rows[:, None], (rows < n)[:, None]
    if HAS_BIAS:
        bias_ptr += expert * 2 * n
        gate += tl.load(bias_ptr + out_rows, mask=is_row, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + n + out_rows, mask=is_row, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[None, :].to(tl.int64) * n + out_rows, out, mask=is_row & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles", "m"])
def _experts_down_kernel(
    x_ptr,  # [num_pairs, K], in the order of pairs
    data_ptr,  # [num_experts, n, K]; of mxfp4 and int4 [.., K / 4] uint16
    scales_ptr,  # [num_experts, cdiv(n, SCALE_ROWS), GROUPS]; of mxfp4 [num_experts, n, K / 32] uint8
    offsets_ptr,  # as the scales, of int4; or None
    bias_ptr,  # [num_experts, n], if HAS_BIAS
    weights_ptr,  # [num_pairs] fp32
    experts_ptr,  # [num_pairs] int32, if LONE
    order_ptr,  # [num_pairs] int32, unless LONE
    tiles_ptr,  # [3, num_tiles] int32, unless LONE
    out_ptr,  # [SLOTS, m, n]
    num_tiles,
    m,
    n,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # pairs of a token
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,  # warps that share the columns of a row
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,  # of data, as `Form` has it
    SCALE_ROWS: tl.constexpr,  # of codes, that share scales; 0 without codes
    GROUPS: tl.constexpr,  # of columns of codes, with a scale each; 0 without codes
    LONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), num_tiles). A program computes BLOCK_N outputs of a tile of pairs; 0 for padding."""
    VALUES: tl.constexpr = 4 if FORM == "mxfp4" or FORM == "int4" else 1  # in a number of data
    WIDTH: tl.constexpr = K // VALUES
    BLOCK: tl.constexpr = BLOCK_K // VALUES
    STEP: tl.constexpr = BLOCK * SPLITS
    columns, places_k = columns_of(BLOCK, SPLITS), columns_down(BLOCK, SPLITS)
    lanes = tl.arange(0, PAIRS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = rows_of(rows < n, SPLITS)
    wait_for_predecessor(PDL)
    expert, begin, end = _tile_of(experts_ptr, tiles_ptr, num_tiles, LONE)
    if begin >= end:
        return
    places = begin + lanes
    inside = places < end
    pairs = _pairs_at(order_ptr, places, inside, LONE)
    first, known = tl.program_id(0) * BLOCK_N, tl.maximum(expert, 0)
    weight_rows = known * n + rows_of(rows, SPLITS)
    acc = no_sums(BLOCK_N, PAIRS, SPLITS)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    of_tile = rows_of(rows - first, SPLITS)
    scale_ptr = factors_of(scales_ptr, known, first, of_tile, n, K, FORM, SCALE_ROWS, GROUPS)
    offset_ptr = factors_of(offsets_ptr, known, first, of_tile, n, K, FORM, SCALE_ROWS, GROUPS)
    factors = factors_at(scale_ptr, offset_ptr, inside_n, 0, K, BLOCK, SPLITS, FORM, SCALE_ROWS, GROUPS, dtype)
    row_starts = lanes_of(places.to(tl.int64) * K, SPLITS)
    for start in tl.range(0, tl.where(expert < 0, 0, WIDTH), STEP, num_stages=STAGES):
        is_inside = lanes_of(inside, SPLITS) & (start + places_k < WIDTH)
        x = tokens_at(x_ptr, row_starts, start + places_k, is_inside, FORM)
        weights = weights_at(data_ptr, weight_rows, inside_n, start + columns, WIDTH, STEP)
        x_sums = sums_at(x, factors, BLOCK_N, SPLITS, HAS_OFFSETS, dtype)
        acc = multiply(weights, factors, x, x_sums, acc, FORM, GROUPS, HAS_OFFSETS, dtype)
        if FORM != "bytes" or GROUPS > 1:
            factors = factors_at(
                scale_ptr, offset_ptr, inside_n, start + STEP, K, BLOCK, SPLITS, FORM, SCALE_ROWS, GROUPS, dtype
            )
    if FORM == "bytes" and GROUPS == 1:
        acc *= factors
    acc = whole_sums(acc, FORM, SPLITS, dtype)
    out_rows, is_row = rows[:, None], (rows < n)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * n + out_rows, mask=is_row & (expert >= 0), other=0.0)
        acc += bias.to(tl.float32)
    acc *= tl.load(weights_ptr + pairs, mask=inside, other=0.0)[None, :]
    planes = (pairs % SLOTS).to(tl.int64) * m + pairs // SLOTS
    tl.store(
        out_ptr + planes[None, :] * n + out_rows,
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row & inside[None, :],
    )


def experts_gate_up(
    x: Tensor,  # [m, k], contiguous
    matrix: ExpertMatrix,  # n is twice the inner width, gate first
    routing: Routing,
    groups: Groups | None,  # None for a lone token
    activation: str,  # silu, gelu_pytorch_tanh or clamped_swiglu
    tiles: ExpertTiles,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return `activation(gate) * up` of each pair, in the order of `groups`: `[num_pairs, inner]`.

    Rows of padding are left unset.
    """
    inner, num_pairs = matrix.num_out // 2, routing.experts.numel()
    num_tiles = _check(x, matrix, routing, groups, x.shape[0], tiles, is_gated=True)
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _experts_gate_up_kernel[(triton.cdiv(inner, tiles.gate_rows), num_tiles)](
        x_ptr=x,
        out_ptr=out,
        num_tiles=num_tiles,
        n=inner,
        BLOCK_N=tiles.gate_rows,
        ACTIVATION=activation,
        **_operands(x, matrix, routing, groups, tiles, pdl=pdl),
    )
    return out


def experts_down(
    x: Tensor,  # [num_pairs, k], contiguous, in the order of `groups`
    matrix: ExpertMatrix,
    routing: Routing,
    groups: Groups | None,  # None for a lone token
    tiles: ExpertTiles,
    *,
    out_dtype: torch.dtype,
    pdl: bool = False,
) -> Tensor:
    """Return the weighted output of each pair: `[num_slots, m, n]`, 0 for padding."""
    (m, num_slots), n = routing.experts.shape, matrix.num_out
    num_tiles = _check(x, matrix, routing, groups, m * num_slots, tiles, is_gated=False)
    out = torch.empty((num_slots, m, n), dtype=out_dtype, device=x.device)
    _experts_down_kernel[(triton.cdiv(n, tiles.down_rows), num_tiles)](
        x_ptr=x,
        weights_ptr=routing.weights,
        out_ptr=out,
        num_tiles=num_tiles,
        m=m,
        n=n,
        BLOCK_N=tiles.down_rows,
        **_operands(x, matrix, routing, groups, tiles, pdl=pdl),
    )
    return out


def _operands(
    x: Tensor, matrix: ExpertMatrix, routing: Routing, groups: Groups | None, tiles: ExpertTiles, *, pdl: bool
) -> dict[str, Any]:
    """Return the arguments that both kernels take: matrix, order of pairs, and settings of the launch.

    Of MXFP4 and INT4, kernels read numbers of 16 bits, with four values each.
    """
    data, bias = matrix.data, matrix.bias
    return {
        "data_ptr": data.view(torch.uint16) if matrix.form in PACKED else data,
        "scales_ptr": matrix.scales,
        "offsets_ptr": matrix.offsets,
        "bias_ptr": x if bias is None else bias,
        "experts_ptr": routing.experts,
        "order_ptr": routing.experts if groups is None else groups.order,
        "tiles_ptr": routing.experts if groups is None else groups.tiles,
        "K": matrix.num_in,
        "SLOTS": routing.experts.shape[1],
        "PAIRS": tiles.pairs,
        "BLOCK_K": tiles.block_k,
        "STAGES": tiles.stages,
        "SPLITS": tiles.splits,
        "HAS_BIAS": bias is not None,
        "FORM": matrix.form.value,
        "SCALE_ROWS": matrix.scale_rows,
        "GROUPS": matrix.scale_groups,
        "LONE": groups is None,
        "PDL": pdl,
        "num_warps": tiles.warps,
        "launch_pdl": pdl,
    }


def _check(
    x: Tensor,
    matrix: ExpertMatrix,
    routing: Routing,
    groups: Groups | None,
    num_rows: int,
    tiles: ExpertTiles,
    *,
    is_gated: bool,
) -> int:
    """Require operands that fit; return the number of tiles."""
    k = matrix.num_in
    assert x.shape == (num_rows, k) and x.is_contiguous(), f"x {tuple(x.shape)}: contiguous [{num_rows}, {k}] needed"
    matrix.check(x.dtype, is_gated=is_gated)
    rows = tiles.gate_rows if is_gated else tiles.down_rows
    if matrix.form is Form.BYTES:
        assert tiles.splits == 1 and GROUP_COLUMNS % rows == GROUP_COLUMNS % tiles.block_k == 0, (
            f"{tiles}: of codes, a tile lies in {GROUP_COLUMNS} rows and columns, without splits"
        )
    assert matrix.form is not Form.INT4 or tiles.block_k == BLOCK_COLUMNS, f"{tiles}: a tile of INT4 is a block"
    assert routing.experts.is_contiguous() and routing.weights.is_contiguous(), "routing: contiguous"
    assert groups is not None or routing.experts.shape[0] == 1, "without groups, a lone token"
    return routing.experts.numel() if groups is None else groups.tiles.shape[1]
