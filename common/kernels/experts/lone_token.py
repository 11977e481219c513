"""Experts of a lone token, at the speed of reading their matrices: products of vectors, as in `products.gemv`.

Programs of one warp request many tiles of weights before the first is used. The second product adds up the experts of
the token, in their order, and the residual. Its experts are known before the first product has ended, so its first
tiles are requested before the wait for the predecessor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import ExpertMatrix, Routing
from common.kernels.base.gate import gated
from common.kernels.base.pdl import wait_for_predecessor

BLOCK_K = 256  # so that a thread of a warp has 8 neighbouring elements of each row
GATE_ROWS, DOWN_ROWS = 2, 2  # of a program
GATE_STAGES, DOWN_STAGES = 8, 12  # tiles on the way at once


@triton.jit
def row_tile(row_ptr, columns, inside_n, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the tile INDEX of elements or codes `[ROWS, BLOCK_K]`; read once, so evicted first."""
    inside = inside_n
    if (INDEX + 1) * BLOCK_K > K:
        inside = inside_n & (columns < K - INDEX * BLOCK_K)
    return tl.load(row_ptr + INDEX * BLOCK_K + columns, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _piece(x_ptr, columns, INDEX: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the piece `[1, BLOCK_K]` of a vector beside the tile INDEX."""
    return tl.load(x_ptr + INDEX * BLOCK_K + columns, mask=columns < K - INDEX * BLOCK_K, other=0.0).to(tl.float32)


@triton.jit
def _rows_of(data_ptr, experts_ptr, slot, rows, N: tl.constexpr, K: tl.constexpr):
    """Return pointers to the rows of the expert in a slot; padding reads the first expert."""
    expert = tl.maximum(tl.load(experts_ptr + slot), 0).to(tl.int64)
    return data_ptr + (expert * N + rows[:, None]) * K


@triton.jit
def _lone_gate_up_kernel(
    x_ptr,  # [K]
    data_ptr,  # [num_experts, 2 * N, K], gate first
    bias_ptr,  # [num_experts, 2 * N], if HAS_BIAS
    experts_ptr,  # [num_slots] int32
    out_ptr,  # [num_slots, N]
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # at most the number of tiles
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS), num_slots). A program computes ROWS outputs of an expert."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows, slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    columns = tl.arange(0, BLOCK_K)[None, :]
    inside_n = (rows < N)[:, None]
    wait_for_predecessor(PDL)
    gate_ptr = _rows_of(data_ptr, experts_ptr, slot, rows, 2 * N, K)
    up_ptr = gate_ptr + N * K
    gates = (row_tile(gate_ptr, columns, inside_n, 0, K, BLOCK_K),)
    ups = (row_tile(up_ptr, columns, inside_n, 0, K, BLOCK_K),)
    for i in tl.static_range(1, STAGES):
        gates = gates + (row_tile(gate_ptr, columns, inside_n, i, K, BLOCK_K),)  # type: ignore[assignment]
        ups = ups + (row_tile(up_ptr, columns, inside_n, i, K, BLOCK_K),)  # type: ignore[assignment]
    gate_acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    up_acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for i in tl.static_range(TILES):
        if i + STAGES < TILES:
            gates = gates + (row_tile(gate_ptr, columns, inside_n, i + STAGES, K, BLOCK_K),)  # type: ignore[assignment]
            ups = ups + (row_tile(up_ptr, columns, inside_n, i + STAGES, K, BLOCK_K),)  # type: ignore[assignment]
        x = _piece(x_ptr, columns, i, K, BLOCK_K)
        gate_acc += gates[i].to(tl.float32) * x
        up_acc += ups[i].to(tl.float32) * x
    gate, up = tl.sum(gate_acc, axis=1), tl.sum(up_acc, axis=1)
    if HAS_BIAS:
        bias_ptr += tl.maximum(tl.load(experts_ptr + slot), 0) * 2 * N + rows
        gate += tl.load(bias_ptr, mask=rows < N, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + N, mask=rows < N, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION)
    tl.store(out_ptr + slot * N + rows, out.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def _lone_down_kernel(
    x_ptr,  # [SLOTS, K]
    data_ptr,  # [num_experts, N, K]
    bias_ptr,  # [num_experts, N], if HAS_BIAS
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
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS),). A program computes ROWS outputs, of all experts of the token."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K  # of an expert
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)[None, :]
    inside_n = (rows < N)[:, None]
    row_ptrs = (_rows_of(data_ptr, experts_ptr, 0, rows, N, K),)
    for slot in tl.static_range(1, SLOTS):
        row_ptrs = row_ptrs + (_rows_of(data_ptr, experts_ptr, slot, rows, N, K),)  # type: ignore[assignment]
    tiles = (row_tile(row_ptrs[0], columns, inside_n, 0, K, BLOCK_K),)
    for i in tl.static_range(1, STAGES):
        tiles = tiles + (row_tile(row_ptrs[i // TILES], columns, inside_n, i % TILES, K, BLOCK_K),)  # type: ignore[assignment]
    wait_for_predecessor(PDL)
    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    y = tl.load(residual_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    for i in tl.static_range(SLOTS * TILES):
        if i + STAGES < SLOTS * TILES:
            ahead_ptr = row_ptrs[(i + STAGES) // TILES]
            tiles = tiles + (row_tile(ahead_ptr, columns, inside_n, (i + STAGES) % TILES, K, BLOCK_K),)  # type: ignore[assignment]
        weight = tl.load(weights_ptr + i // TILES)
        x = _piece(x_ptr + i // TILES * K, columns, i % TILES, K, BLOCK_K) * weight
        acc += tiles[i].to(tl.float32) * x
        if HAS_BIAS and i % TILES == 0:
            expert = tl.maximum(tl.load(experts_ptr + i // TILES), 0)
            y += tl.load(bias_ptr + expert * N + rows, mask=rows < N, other=0.0).to(tl.float32) * weight
    y += tl.sum(acc, axis=1)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < N)


def lone_experts(
    x: Tensor,  # [1, hidden], contiguous
    routing: Routing,
    gate_up: ExpertMatrix,  # gate first
    down: ExpertMatrix,
    activation: str,  # silu, gelu_pytorch_tanh or clamped_swiglu
    residual: Tensor,  # [1, hidden], contiguous; overwritten
    *,
    pdl: bool = False,
) -> Tensor:
    """Add the weighted outputs of a token's experts to `residual`; return `residual`. Matrices are plain."""
    inner, hidden, num_slots = down.num_in, down.num_out, routing.experts.shape[1]
    assert x.shape == residual.shape == (1, hidden), (
        f"x {tuple(x.shape)}, residual {tuple(residual.shape)}: [1, hidden]"
    )
    assert gate_up.scales is None and down.scales is None, "a lone token's plain experts"
    assert gate_up.data.shape[1:] == (2 * inner, hidden), f"gate and up {tuple(gate_up.data.shape)}: they do not fit"
    for tensor in (x, residual, gate_up.data, down.data, *routing):
        assert tensor.is_contiguous(), "operands: contiguous"
    out = torch.empty((num_slots, inner), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(hidden, BLOCK_K)
    _lone_gate_up_kernel[(triton.cdiv(inner, GATE_ROWS), num_slots)](
        x_ptr=x,
        data_ptr=gate_up.data,
        bias_ptr=x if gate_up.bias is None else gate_up.bias,
        experts_ptr=routing.experts,
        out_ptr=out,
        N=inner,
        K=hidden,
        ROWS=GATE_ROWS,
        BLOCK_K=BLOCK_K,
        STAGES=min(GATE_STAGES, tiles),
        ACTIVATION=activation,
        HAS_BIAS=gate_up.bias is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    tiles = triton.cdiv(inner, BLOCK_K) * num_slots
    _lone_down_kernel[(triton.cdiv(hidden, DOWN_ROWS),)](
        x_ptr=out,
        data_ptr=down.data,
        bias_ptr=x if down.bias is None else down.bias,
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
        HAS_BIAS=down.bias is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return residual
