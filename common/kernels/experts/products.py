"""Products of tokens and the matrices of their experts: gate and up with the activation, and down with the weights.

A program has a tile of pairs of the same expert. So a part of the expert's matrix is read once for all pairs. A product
has tall tiles of weights; pairs are the narrow side. Results of a pair lie in rows of the pair alone, so no program
adds to the result of another. The reader of these rows adds in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import ExpertMatrix, Groups, Routing
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.experts.mxfp4 import from_mxfp4
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


@triton.jit
def _weights_at(
    data_ptr,
    rows,  # [BLOCK_N, 1] int64
    inside_n,  # [BLOCK_N, 1]
    start,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load a tile of rows `[BLOCK_N, BLOCK]` from element `start` on: weights, or bytes."""
    columns = start + tl.arange(0, BLOCK)[None, :]
    inside = inside_n if WIDTH % BLOCK == 0 else inside_n & (columns < WIDTH)
    return tl.load(data_ptr + rows * WIDTH + columns, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _multiply(weights, scales, x, acc, PACKED: tl.constexpr):
    """Add the product of a tile of weights and a tile of pairs to `acc`."""
    if not PACKED:
        acc = tl.dot(weights, x, acc, input_precision="ieee")
    elif x.dtype == tl.bfloat16:  # unpacked by the compiler, in fewer instructions than here
        acc = tl.dot_scaled(weights, scales, "e2m1", x, None, "bf16", acc, fast_math=True)
    else:
        acc = tl.dot(from_mxfp4(weights, scales, x.dtype), x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tiles"])
def _experts_gate_up_kernel(
    x_ptr,  # [m, K], contiguous
    data_ptr,  # [num_experts, 2 * n, K], gate first; PACKED: [.., K / 2] uint8
    scales_ptr,  # [num_experts, 2 * n, K / 32] uint8, if PACKED
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
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    LONE: tl.constexpr,  # one token: every pair is a tile
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), num_tiles). A program computes BLOCK_N outputs of a tile of pairs."""
    columns, lanes = tl.arange(0, BLOCK_K), tl.arange(0, PAIRS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = (rows < n)[:, None]
    wait_for_predecessor(PDL)
    expert, begin, end = _tile_of(experts_ptr, tiles_ptr, num_tiles, LONE)
    if (expert < 0) | (begin >= end):
        return
    places = begin + lanes
    inside = places < end
    tokens = (_pairs_at(order_ptr, places, inside, LONE) // SLOTS).to(tl.int64)
    gate_rows = expert * 2 * n + rows[:, None]
    up_rows = gate_rows + n
    gate = tl.zeros((BLOCK_N, PAIRS), tl.float32)
    up = tl.zeros((BLOCK_N, PAIRS), tl.float32)
    BYTES: tl.constexpr = 2 if PACKED else 1  # elements of K in an element of data
    GROUPS: tl.constexpr = BLOCK_K // 32
    gate_scales, up_scales = 0, 0
    if PACKED:  # loaded a tile ahead, because their rows are too narrow for the asynchronous copies of the rest
        gate_scales = _weights_at(scales_ptr, gate_rows, inside_n, 0, K // 32, GROUPS)
        up_scales = _weights_at(scales_ptr, up_rows, inside_n, 0, K // 32, GROUPS)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside_k = (start + columns < K)[:, None]
        x = tl.load(
            x_ptr + tokens[None, :] * K + (start + columns)[:, None], mask=inside[None, :] & inside_k, other=0.0
        )
        gates = _weights_at(data_ptr, gate_rows, inside_n, start // BYTES, K // BYTES, BLOCK_K // BYTES)
        gate = _multiply(gates, gate_scales, x, gate, PACKED)
        ups = _weights_at(data_ptr, up_rows, inside_n, start // BYTES, K // BYTES, BLOCK_K // BYTES)
        up = _multiply(ups, up_scales, x, up, PACKED)
        if PACKED:
            gate_scales = _weights_at(scales_ptr, gate_rows, inside_n, start // 32 + GROUPS, K // 32, GROUPS)
            up_scales = _weights_at(scales_ptr, up_rows, inside_n, start // 32 + GROUPS, K // 32, GROUPS)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_rows, mask=inside_n, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + up_rows, mask=inside_n, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[None, :].to(tl.int64) * n + rows[:, None], out, mask=inside_n & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles", "m"])
def _experts_down_kernel(
    x_ptr,  # [num_pairs, K], in the order of pairs
    data_ptr,  # [num_experts, n, K]; PACKED: [.., K / 2] uint8
    scales_ptr,  # [num_experts, n, K / 32] uint8, if PACKED
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
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    LONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), num_tiles). A program computes BLOCK_N outputs of a tile of pairs; 0 for padding."""
    columns, lanes = tl.arange(0, BLOCK_K), tl.arange(0, PAIRS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = (rows < n)[:, None]
    wait_for_predecessor(PDL)
    expert, begin, end = _tile_of(experts_ptr, tiles_ptr, num_tiles, LONE)
    if begin >= end:
        return
    places = begin + lanes
    inside = places < end
    pairs = _pairs_at(order_ptr, places, inside, LONE)
    weight_rows = expert * n + rows[:, None]
    acc = tl.zeros((BLOCK_N, PAIRS), tl.float32)
    BYTES: tl.constexpr = 2 if PACKED else 1
    GROUPS: tl.constexpr = BLOCK_K // 32
    is_expert = inside_n & (expert >= 0)
    scales = 0
    if PACKED:
        scales = _weights_at(scales_ptr, weight_rows, is_expert, 0, K // 32, GROUPS)
    for start in tl.range(0, tl.where(expert < 0, 0, K), BLOCK_K, num_stages=STAGES):
        inside_k = (start + columns < K)[:, None]
        x_elements = places[None, :].to(tl.int64) * K + (start + columns)[:, None]
        x = tl.load(x_ptr + x_elements, mask=inside[None, :] & inside_k, other=0.0)
        weights = _weights_at(data_ptr, weight_rows, inside_n, start // BYTES, K // BYTES, BLOCK_K // BYTES)
        acc = _multiply(weights, scales, x, acc, PACKED)
        if PACKED:
            scales = _weights_at(scales_ptr, weight_rows, is_expert, start // 32 + GROUPS, K // 32, GROUPS)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + weight_rows, mask=is_expert, other=0.0).to(tl.float32)
    acc *= tl.load(weights_ptr + pairs, mask=inside, other=0.0)[None, :]
    planes = (pairs % SLOTS).to(tl.int64) * m + pairs // SLOTS
    tl.store(
        out_ptr + planes[None, :] * n + rows[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=inside_n & inside[None, :],
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
    num_tiles = _check(x, matrix, routing, groups, x.shape[0])
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _experts_gate_up_kernel[(triton.cdiv(inner, tiles.gate_rows), num_tiles)](
        x_ptr=x,
        data_ptr=matrix.data,
        scales_ptr=matrix.data if matrix.scales is None else matrix.scales,
        bias_ptr=x if matrix.bias is None else matrix.bias,
        experts_ptr=routing.experts,
        order_ptr=routing.experts if groups is None else groups.order,
        tiles_ptr=routing.experts if groups is None else groups.tiles,
        out_ptr=out,
        num_tiles=num_tiles,
        n=inner,
        K=matrix.num_in,
        SLOTS=routing.experts.shape[1],
        PAIRS=tiles.pairs,
        BLOCK_N=tiles.gate_rows,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.stages,
        ACTIVATION=activation,
        HAS_BIAS=matrix.bias is not None,
        PACKED=matrix.scales is not None,
        LONE=groups is None,
        PDL=pdl,
        num_warps=tiles.warps,
        launch_pdl=pdl,
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
    num_tiles = _check(x, matrix, routing, groups, m * num_slots)
    out = torch.empty((num_slots, m, n), dtype=out_dtype, device=x.device)
    _experts_down_kernel[(triton.cdiv(n, tiles.down_rows), num_tiles)](
        x_ptr=x,
        data_ptr=matrix.data,
        scales_ptr=matrix.data if matrix.scales is None else matrix.scales,
        bias_ptr=x if matrix.bias is None else matrix.bias,
        weights_ptr=routing.weights,
        experts_ptr=routing.experts,
        order_ptr=routing.experts if groups is None else groups.order,
        tiles_ptr=routing.experts if groups is None else groups.tiles,
        out_ptr=out,
        num_tiles=num_tiles,
        m=m,
        n=n,
        K=matrix.num_in,
        SLOTS=num_slots,
        PAIRS=tiles.pairs,
        BLOCK_N=tiles.down_rows,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.stages,
        HAS_BIAS=matrix.bias is not None,
        PACKED=matrix.scales is not None,
        LONE=groups is None,
        PDL=pdl,
        num_warps=tiles.warps,
        launch_pdl=pdl,
    )
    return out


def _check(x: Tensor, matrix: ExpertMatrix, routing: Routing, groups: Groups | None, num_rows: int) -> int:
    """Require operands that fit; return the number of tiles."""
    data, scales, bias = matrix
    num, n, k = data.shape[0], matrix.num_out, matrix.num_in
    assert x.shape == (num_rows, k) and x.is_contiguous(), f"x {tuple(x.shape)}: contiguous [{num_rows}, {k}] needed"
    assert data.is_contiguous() and (scales is not None or data.dtype == x.dtype), f"matrix {data.dtype}: contiguous"
    if scales is not None:
        assert data.dtype == scales.dtype == torch.uint8 and scales.shape == (num, n, k // 32) and k % 32 == 0, (
            f"scales {tuple(scales.shape)} {scales.dtype}: uint8 [{num}, {n}, {k} / 32] needed"
        )
        assert scales.is_contiguous(), "scales: contiguous"
    assert bias is None or (bias.shape == (num, n) and bias.is_contiguous()), f"bias: contiguous [{num}, {n}] needed"
    assert routing.experts.is_contiguous() and routing.weights.is_contiguous(), "routing: contiguous"
    assert groups is not None or routing.experts.shape[0] == 1, "without groups, a lone token"
    return routing.experts.numel() if groups is None else groups.tiles.shape[1]
