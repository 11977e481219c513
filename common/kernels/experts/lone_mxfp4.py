"""Second product of a lone token's experts in MXFP4, with the sum of all experts and the residual.

A program has some rows of all experts of the token. Each warp has an expert, or a part of its columns. The experts are
known before the first product has ended, so their rows are requested into the L2 cache before the wait for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import ExpertMatrix, Routing
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.experts.mxfp4 import GROUP, shifted_back
from common.kernels.experts.operand_tiles import factors_at, multiply, tokens_at, weights_at

ROWS, BLOCK_K, STAGES = 16, 128, 3
SPLITS = 2  # warps of an expert
LANES = 8  # columns of a product of matrices, of which one is the token
MAX_SLOTS = 8  # experts of a token


@triton.jit
def _request(rows_ptr, num_rows, ROW_BYTES: tl.constexpr, ROWS: tl.constexpr):
    """Start reading the first `num_rows` of ROWS rows, which lie side by side, into the L2 cache."""
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(ROWS * ROW_BYTES, 128))
    places = tl.minimum(tl.arange(0, LINES) * 128, num_rows * ROW_BYTES - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(rows_ptr + places).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _lone_down_kernel(
    x_ptr,  # [SLOTS, K]
    data_ptr,  # [num_experts, N, K / 4] uint16
    bytes_ptr,  # the same, as uint8
    scales_ptr,  # [num_experts, N, K / 32] uint8
    bias_ptr,  # [num_experts, N], if HAS_BIAS
    experts_ptr,  # [SLOTS] int32
    weights_ptr,  # [SLOTS] fp32
    residual_ptr,  # [N]; may be out_ptr
    out_ptr,  # [N]
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(N, ROWS),). A program computes ROWS outputs, of all experts of the token."""
    WIDTH: tl.constexpr = K // 4
    BLOCK: tl.constexpr = BLOCK_K // 4
    STEP: tl.constexpr = BLOCK * SPLITS
    first_row = tl.program_id(0) * ROWS
    parts = tl.arange(0, SLOTS * SPLITS)
    slots, split = parts // SPLITS, parts % SPLITS
    rows = first_row + tl.arange(0, ROWS)
    if PDL:
        for slot in tl.static_range(SLOTS):
            row = tl.maximum(tl.load(experts_ptr + slot), 0).to(tl.int64) * N + first_row
            _request(bytes_ptr + row * (K // 2), tl.minimum(N - first_row, ROWS), K // 2, ROWS)
            _request(scales_ptr + row * (K // 32), tl.minimum(N - first_row, ROWS), K // 32, ROWS)
    experts = tl.maximum(tl.load(experts_ptr + slots), 0).to(tl.int64)  # padding reads the first expert
    weights = tl.load(weights_ptr + slots)
    inside_n = (rows < N)[None, :, None]
    weight_rows = experts[:, None, None] * N + rows[None, :, None]
    columns = (split * BLOCK)[:, None, None] + tl.arange(0, BLOCK)[None, None, :]
    places_k = (split * BLOCK)[:, None, None] + tl.arange(0, BLOCK)[None, :, None]
    groups = (split * (BLOCK // 8))[:, None, None] + tl.arange(0, BLOCK // 8)[None, None, :]
    is_token = (tl.arange(0, LANES) == 0)[None, None, :]
    row_starts = (slots * K).to(tl.int64)[:, None, None] + tl.zeros((1, 1, LANES), tl.int64)
    acc = tl.zeros((SLOTS * SPLITS, ROWS, LANES), tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wait_for_predecessor(PDL)
    factors = factors_at(scales_ptr, weight_rows, inside_n, groups, K // 32, dtype)
    for start in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        x = tokens_at(x_ptr, row_starts, start + places_k, is_token & (start + places_k < WIDTH), True)
        tile = weights_at(data_ptr, weight_rows, inside_n, start + columns, WIDTH, STEP)
        acc = multiply(tile, factors, x, acc, True, dtype)
        factors = factors_at(scales_ptr, weight_rows, inside_n, (start + STEP) // 8 + groups, K // 32, dtype)
    sums = shifted_back(tl.sum(tl.sum(acc, axis=2) * weights[:, None], axis=0), dtype)
    if HAS_BIAS:
        is_bias = (rows < N)[None, :] & (split == 0)[:, None]
        bias = tl.load(bias_ptr + experts[:, None] * N + rows[None, :], mask=is_bias, other=0.0).to(tl.float32)
        sums += tl.sum(bias * weights[:, None], axis=0)
    sums += tl.load(residual_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, sums.to(out_ptr.dtype.element_ty), mask=rows < N)


def takes(num_slots: int) -> bool:
    """Tell whether a token with so many experts is computed: warps of a program are a power of two."""
    return num_slots <= MAX_SLOTS and num_slots & (num_slots - 1) == 0


def lone_down(
    x: Tensor,  # [num_slots, inner], contiguous
    matrix: ExpertMatrix,  # in MXFP4
    routing: Routing,
    residual: Tensor,  # [1, hidden], contiguous; overwritten
    *,
    pdl: bool = False,
) -> Tensor:
    """Add the weighted outputs of a token's experts to `residual`; return `residual`."""
    data, scales, bias = matrix
    (num_slots, inner), hidden = x.shape, matrix.num_out
    assert takes(num_slots), f"{num_slots} experts of a token: a power of two of at most {MAX_SLOTS}"
    assert scales is not None and data.shape[1:] == (hidden, inner // 2) and inner % GROUP.value == 0, (
        f"matrix {tuple(data.shape)} {data.dtype}: MXFP4 of [{hidden}, {inner}] needed"
    )
    assert residual.shape == (1, hidden) and routing.experts.shape == (1, num_slots), "operands of one token"
    for tensor in (x, residual, data, scales, *routing):
        assert tensor.is_contiguous(), "operands: contiguous"
    _lone_down_kernel[(triton.cdiv(hidden, ROWS),)](
        x_ptr=x,
        data_ptr=data.view(torch.uint16),
        bytes_ptr=data,
        scales_ptr=scales,
        bias_ptr=x if bias is None else bias,
        experts_ptr=routing.experts,
        weights_ptr=routing.weights,
        residual_ptr=residual,
        out_ptr=residual,
        N=hidden,
        K=inner,
        SLOTS=num_slots,
        SPLITS=SPLITS,
        LANES=LANES,
        ROWS=ROWS,
        BLOCK_K=BLOCK_K,
        STAGES=STAGES,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=num_slots * SPLITS,
        launch_pdl=pdl,
    )
    return residual
