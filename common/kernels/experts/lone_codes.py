"""Experts of a lone token in codes of 8 bits, at the speed of reading their matrices.

As `lone_token` has it, with codes that are widened to fp32. A thread loads 16 codes of a row at once, but only 8
numbers of the token. So a tile is taken apart into halves of 8 columns, which a thread has of both. Scales of groups of
columns are applied to the token, those of whole rows to sums of an expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.codes import GROUP as GROUP_COLUMNS
from common.kernels.base.codes import widened
from common.kernels.base.expert_operands import ExpertMatrix, Routing
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.experts.lone_token import row_tile

BLOCK_K = 512  # 16 codes a thread
GATE_ROWS, DOWN_ROWS = 4, 2  # of a program
GATE_STAGES, DOWN_STAGES = 4, 8  # tiles on the way at once, within 128 registers
GROUP = tl.constexpr(GROUP_COLUMNS)
# The byte plus 128 as the last bits of 2 ** 23 in fp32, from which 2 ** 23 + 128 is taken.
_FOUR_BYTES = tl.constexpr(
    """{
    .reg .b32 more, bits;
    xor.b32 more, $4, 0x80808080;
    prmt.b32 bits, more, 0x4B000000, 0x7440;
    mov.b32 $0, bits;
    prmt.b32 bits, more, 0x4B000000, 0x7441;
    mov.b32 $1, bits;
    prmt.b32 bits, more, 0x4B000000, 0x7442;
    mov.b32 $2, bits;
    prmt.b32 bits, more, 0x4B000000, 0x7443;
    mov.b32 $3, bits;
    add.rn.f32 $0, $0, 0fCB000080;
    add.rn.f32 $1, $1, 0fCB000080;
    add.rn.f32 $2, $2, 0fCB000080;
    add.rn.f32 $3, $3, 0fCB000080;
    }"""
)


@triton.jit
def _half(x_ptr, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the numbers of a vector beside half of the tile INDEX: fp32 `[1, BLOCK_K / 16, 8]`."""
    return tl.load(x_ptr + INDEX * BLOCK_K + columns, mask=columns < K - INDEX * BLOCK_K, other=0.0).to(tl.float32)


@triton.jit
def _place_of(scales_ptr, expert, first, rows, N: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the place of the scales of rows `first + rows` of an expert: a pointer, or `[ROWS, 1, 1]`."""
    if SCALE_ROWS == 1:
        place_ptr = scales_ptr + ((expert * N + first + rows) * GROUPS)[:, None, None]
    else:
        place_ptr = scales_ptr + (expert * ((N + SCALE_ROWS - 1) // SCALE_ROWS) + first // SCALE_ROWS) * GROUPS
    return place_ptr


@triton.jit
def _group_scales(
    place_ptr,
    groups,
    inside_n,
    INDEX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load the scales of the tile INDEX, one for each 16 columns: `[1 or ROWS, BLOCK_K / 16, 1]`; 1 for whole rows."""
    scales = 1.0
    if GROUPS > 1:
        group = INDEX * (BLOCK_K // GROUP) + groups
        inside = group < GROUPS
        if SCALE_ROWS == 1:
            inside = inside & inside_n
        scales = tl.load(place_ptr + group, mask=inside, other=0.0)
    return scales


@triton.jit
def _row_scales(scales_ptr, expert, rows, inside_n, N: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """Load the scales of whole rows of an expert."""
    place_ptr = scales_ptr + expert * ((N + SCALE_ROWS - 1) // SCALE_ROWS) + rows // SCALE_ROWS
    return tl.load(place_ptr, mask=inside_n, other=0.0)


@triton.jit
def _added(acc, tile, even_x, odd_x, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """Add the products of a tile and the halves of a token beside it to `acc [ROWS, BLOCK_K / 16, 8]`."""
    eights = tl.permute(tl.reshape(tile, (ROWS, BLOCK_K // 16, 2, 8)), (0, 1, 3, 2))
    even, odd = tl.split(eights)
    acc += _in_fp32(even, dtype) * even_x
    acc += _in_fp32(odd, dtype) * odd_x
    return acc


@triton.jit
def _in_fp32(codes, dtype: tl.constexpr):
    """Return codes in fp32, exactly; signed bytes beside a token in 16 bits by bits, because conversions are slow."""
    if codes.dtype == tl.int8 and dtype.primitive_bitwidth == 16:
        numbers = tl.inline_asm_elementwise(
            _FOUR_BYTES, "=f,=f,=f,=f,r", [codes], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        numbers = widened(codes)
    return numbers


@triton.jit
def _lone_codes_gate_up_kernel(
    x_ptr,  # [K]
    data_ptr,  # [num_experts, 2 * N, K] codes, gate first
    scales_ptr,  # [num_experts, cdiv(2 * N, SCALE_ROWS), GROUPS] fp32
    bias_ptr,  # [num_experts, 2 * N], or None
    experts_ptr,  # [num_slots] int32
    out_ptr,  # [num_slots, N]
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # at most the number of tiles
    SCALE_ROWS: tl.constexpr,  # that share scales, and divide N
    GROUPS: tl.constexpr,  # of columns
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS), num_slots). A program computes ROWS outputs of an expert."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, inside, slot = tl.program_id(0) * ROWS, tl.arange(0, ROWS), tl.program_id(1)
    rows = first + inside
    columns = tl.arange(0, BLOCK_K)[None, :]
    eights = tl.arange(0, BLOCK_K // 16)[None, :, None]
    even = eights * 16 + tl.arange(0, 8)[None, None, :]
    groups = eights * 16 // GROUP
    inside_n, scaled_n = (rows < N)[:, None], (rows < N)[:, None, None]
    wait_for_predecessor(PDL)
    expert = tl.maximum(tl.load(experts_ptr + slot), 0).to(tl.int64)
    gate_ptr = data_ptr + (expert * 2 * N + rows[:, None]) * K
    up_ptr = gate_ptr + N * K
    gate_scales_ptr = _place_of(scales_ptr, expert, first, inside, 2 * N, SCALE_ROWS, GROUPS)
    up_scales_ptr = _place_of(scales_ptr, expert, N + first, inside, 2 * N, SCALE_ROWS, GROUPS)
    gates = (row_tile(gate_ptr, columns, inside_n, 0, K, BLOCK_K),)
    ups = (row_tile(up_ptr, columns, inside_n, 0, K, BLOCK_K),)
    for i in tl.static_range(1, STAGES):
        gates = gates + (row_tile(gate_ptr, columns, inside_n, i, K, BLOCK_K),)  # type: ignore[assignment]
        ups = ups + (row_tile(up_ptr, columns, inside_n, i, K, BLOCK_K),)  # type: ignore[assignment]
    gate_scales = (_group_scales(gate_scales_ptr, groups, scaled_n, 0, BLOCK_K, SCALE_ROWS, GROUPS),)
    up_scales = (_group_scales(up_scales_ptr, groups, scaled_n, 0, BLOCK_K, SCALE_ROWS, GROUPS),)
    for i in tl.static_range(1, TILES):
        gate_scales = gate_scales + (_group_scales(gate_scales_ptr, groups, scaled_n, i, BLOCK_K, SCALE_ROWS, GROUPS),)  # type: ignore[assignment]
        up_scales = up_scales + (_group_scales(up_scales_ptr, groups, scaled_n, i, BLOCK_K, SCALE_ROWS, GROUPS),)  # type: ignore[assignment]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    gate_acc = tl.zeros((ROWS, BLOCK_K // 16, 8), tl.float32)
    up_acc = tl.zeros((ROWS, BLOCK_K // 16, 8), tl.float32)
    for i in tl.static_range(TILES):
        if i + STAGES < TILES:
            gates = gates + (row_tile(gate_ptr, columns, inside_n, i + STAGES, K, BLOCK_K),)  # type: ignore[assignment]
            ups = ups + (row_tile(up_ptr, columns, inside_n, i + STAGES, K, BLOCK_K),)  # type: ignore[assignment]
        x, other_x = _half(x_ptr, even, i, K, BLOCK_K), _half(x_ptr, even + 8, i, K, BLOCK_K)
        gate_acc = _added(gate_acc, gates[i], x * gate_scales[i], other_x * gate_scales[i], ROWS, BLOCK_K, dtype)
        up_acc = _added(up_acc, ups[i], x * up_scales[i], other_x * up_scales[i], ROWS, BLOCK_K, dtype)
    gate, up = tl.sum(tl.sum(gate_acc, axis=2), axis=1), tl.sum(tl.sum(up_acc, axis=2), axis=1)
    if GROUPS == 1:
        gate *= _row_scales(scales_ptr, expert, rows, rows < N, 2 * N, SCALE_ROWS)
        up *= _row_scales(scales_ptr, expert, N + rows, rows < N, 2 * N, SCALE_ROWS)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + expert * 2 * N + rows, mask=rows < N, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + expert * 2 * N + N + rows, mask=rows < N, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION)
    tl.store(out_ptr + slot * N + rows, out.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def _lone_codes_down_kernel(
    x_ptr,  # [SLOTS, K]
    data_ptr,  # [num_experts, N, K] codes
    scales_ptr,  # [num_experts, cdiv(N, SCALE_ROWS), GROUPS] fp32
    bias_ptr,  # [num_experts, N], or None
    experts_ptr,  # [SLOTS] int32
    weights_ptr,  # [SLOTS] fp32
    residual_ptr,  # [N]; may be out_ptr
    out_ptr,  # [N]
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # at most the number of tiles of all slots
    SCALE_ROWS: tl.constexpr,  # that share scales
    GROUPS: tl.constexpr,  # of columns
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS),). A program computes ROWS outputs, of all experts of the token."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K  # of an expert
    first, inside = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    rows = first + inside
    columns = tl.arange(0, BLOCK_K)[None, :]
    eights = tl.arange(0, BLOCK_K // 16)[None, :, None]
    even = eights * 16 + tl.arange(0, 8)[None, None, :]
    groups = eights * 16 // GROUP
    inside_n, scaled_n = (rows < N)[:, None], (rows < N)[:, None, None]
    experts = (tl.maximum(tl.load(experts_ptr), 0).to(tl.int64),)
    for slot in tl.static_range(1, SLOTS):
        experts = experts + (tl.maximum(tl.load(experts_ptr + slot), 0).to(tl.int64),)  # type: ignore[assignment]
    row_ptrs = (data_ptr + (experts[0] * N + rows[:, None]) * K,)
    places = (_place_of(scales_ptr, experts[0], first, inside, N, SCALE_ROWS, GROUPS),)
    for slot in tl.static_range(1, SLOTS):
        row_ptrs = row_ptrs + (data_ptr + (experts[slot] * N + rows[:, None]) * K,)  # type: ignore[assignment]
        places = places + (_place_of(scales_ptr, experts[slot], first, inside, N, SCALE_ROWS, GROUPS),)  # type: ignore[assignment]
    tiles = (row_tile(row_ptrs[0], columns, inside_n, 0, K, BLOCK_K),)
    scales = (_group_scales(places[0], groups, scaled_n, 0, BLOCK_K, SCALE_ROWS, GROUPS),)
    for i in tl.static_range(1, STAGES):
        tiles = tiles + (row_tile(row_ptrs[i // TILES], columns, inside_n, i % TILES, K, BLOCK_K),)  # type: ignore[assignment]
        scales = scales + (_group_scales(places[i // TILES], groups, scaled_n, i % TILES, BLOCK_K, SCALE_ROWS, GROUPS),)  # type: ignore[assignment]
    wait_for_predecessor(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((ROWS, BLOCK_K // 16, 8), tl.float32)
    whole = tl.zeros((ROWS, BLOCK_K // 16), tl.float32)  # of the slots before, if rows have a scale
    y = tl.load(residual_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    for i in tl.static_range(SLOTS * TILES):
        if i + STAGES < SLOTS * TILES:
            row_ptr, place_ptr = row_ptrs[(i + STAGES) // TILES], places[(i + STAGES) // TILES]
            tile = row_tile(row_ptr, columns, inside_n, (i + STAGES) % TILES, K, BLOCK_K)
            factor = _group_scales(place_ptr, groups, scaled_n, (i + STAGES) % TILES, BLOCK_K, SCALE_ROWS, GROUPS)
            tiles, scales = tiles + (tile,), scales + (factor,)  # type: ignore[assignment]
        weight = tl.load(weights_ptr + i // TILES)
        factors = scales[i] * weight
        x = _half(x_ptr + i // TILES * K, even, i % TILES, K, BLOCK_K) * factors
        other_x = _half(x_ptr + i // TILES * K, even + 8, i % TILES, K, BLOCK_K) * factors
        acc = _added(acc, tiles[i], x, other_x, ROWS, BLOCK_K, dtype)
        if GROUPS == 1 and (i + 1) % TILES == 0:
            of_rows = _row_scales(scales_ptr, experts[i // TILES], rows, rows < N, N, SCALE_ROWS)
            whole += tl.sum(acc, axis=2) * of_rows[:, None]
            acc = tl.zeros((ROWS, BLOCK_K // 16, 8), tl.float32)
        if bias_ptr is not None and i % TILES == 0:
            of_rows = tl.load(bias_ptr + experts[i // TILES] * N + rows, mask=rows < N, other=0.0).to(tl.float32)
            y += of_rows * weight
    if GROUPS > 1:
        whole = tl.sum(acc, axis=2)
    y += tl.sum(whole, axis=1)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < N)


def lone_experts_in_codes(
    x: Tensor,  # [1, hidden], contiguous
    routing: Routing,
    gate_up: ExpertMatrix,  # of codes, gate first
    down: ExpertMatrix,  # of codes
    activation: str,  # silu, gelu_pytorch_tanh or clamped_swiglu
    residual: Tensor,  # [1, hidden], contiguous; overwritten
    *,
    pdl: bool = False,
) -> Tensor:
    """Add the weighted outputs of a token's experts to `residual`; return `residual`."""
    inner, hidden, num_slots = down.num_in, down.num_out, routing.experts.shape[1]
    assert x.shape == residual.shape == (1, hidden), (
        f"x {tuple(x.shape)}, residual {tuple(residual.shape)}: [1, hidden]"
    )
    assert gate_up.data.shape[1:] == (2 * inner, hidden), f"gate and up {tuple(gate_up.data.shape)}: they do not fit"
    gate_up.check_codes(is_gated=True)
    down.check_codes(is_gated=False)
    for tensor in (x, residual, gate_up.data, down.data, *routing):
        assert tensor.is_contiguous(), "operands: contiguous"
    out = torch.empty((num_slots, inner), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(hidden, BLOCK_K)
    _lone_codes_gate_up_kernel[(triton.cdiv(inner, GATE_ROWS), num_slots)](
        x_ptr=x,
        data_ptr=gate_up.data,
        scales_ptr=gate_up.scales,
        bias_ptr=gate_up.bias,
        experts_ptr=routing.experts,
        out_ptr=out,
        N=inner,
        K=hidden,
        ROWS=GATE_ROWS,
        BLOCK_K=BLOCK_K,
        STAGES=min(GATE_STAGES, tiles),
        SCALE_ROWS=gate_up.scale_rows,
        GROUPS=gate_up.scale_groups,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    tiles = triton.cdiv(inner, BLOCK_K) * num_slots
    _lone_codes_down_kernel[(triton.cdiv(hidden, DOWN_ROWS),)](
        x_ptr=out,
        data_ptr=down.data,
        scales_ptr=down.scales,
        bias_ptr=down.bias,
        experts_ptr=routing.experts,
        weights_ptr=routing.weights,
        residual_ptr=residual,
        out_ptr=residual,
        N=hidden,
        K=inner,
        SLOTS=num_slots,
        ROWS=DOWN_ROWS,
        BLOCK_K=BLOCK_K,
        STAGES=min(DOWN_STAGES, tiles),
        SCALE_ROWS=down.scale_rows,
        GROUPS=down.scale_groups,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return residual
