"""Logits of a router: products of tokens and the router's matrix, spread over outputs, as the matrix has few rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.pdl import wait_for_predecessor

FUSED_TOKENS = 8
"""Most tokens that each program of `norm_logits` norms again."""
FEW_TOKENS = 64  # up to here, tiles of `router_logits` have few tokens and long rows


@triton.jit
def _norm_logits_kernel(
    x_ptr,  # [m, K], contiguous
    norm_ptr,  # [K]
    weight_ptr,  # [n, K], contiguous
    normed_ptr,  # [m, K]
    out_ptr,  # [m, n] fp32
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least K
    PDL: tl.constexpr,
):
    """Grid: (n, m). A program norms a token and computes a logit; the first of a token keeps the normed row."""
    row, token = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    weight = tl.load(weight_ptr + row * K + columns, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    wait_for_predecessor(PDL)
    x = tl.load(x_ptr + token * K + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    normed = (x * scale * norm.to(tl.float32)).to(normed_ptr.dtype.element_ty)
    if row == 0:
        tl.store(normed_ptr + token * K + columns, normed, mask=inside)
    logit = tl.sum(normed.to(tl.float32) * weight.to(tl.float32), axis=0)
    tl.store(out_ptr + token * tl.num_programs(0) + row, logit)


@triton.jit(do_not_specialize=["m"])
def _router_logits_kernel(
    x_ptr,  # [m, K], contiguous
    weight_ptr,  # [n, K], contiguous
    out_ptr,  # [m, n] fp32
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), cdiv(m, BLOCK_M))."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_n, inside_m = (rows < n)[:, None], (tokens < m)[None, :]
    x_row_ptr = x_ptr + tokens[None, :].to(tl.int64) * K
    wait_for_predecessor(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        inside_k = columns < K
        x = tl.load(x_row_ptr + columns[:, None], mask=inside_m & inside_k[:, None], other=0.0)
        weight = tl.load(
            weight_ptr + rows[:, None] * K + columns[None, :], mask=inside_n & inside_k[None, :], other=0.0
        )
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    tl.store(out_ptr + tokens[None, :].to(tl.int64) * n + rows[:, None], acc, mask=inside_n & inside_m)


def norm_logits(
    x: Tensor,  # [m, k], contiguous, m up to FUSED_TOKENS
    norm: Tensor,  # [k]
    eps: float,
    weight: Tensor,  # [n, k], contiguous
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the normed rows `[m, k]`, and their logits: fp32 `[m, n]`."""
    (m, k), n = x.shape, weight.shape[0]
    assert m <= FUSED_TOKENS, f"{m} tokens: at most {FUSED_TOKENS} here"
    assert norm.shape == (k,) and norm.is_contiguous(), f"norm weight {tuple(norm.shape)}: ({k},) needed"
    _check(x, weight)
    normed = torch.empty((m, k), dtype=x.dtype, device=x.device)
    logits = torch.empty((m, n), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _norm_logits_kernel[(n, m)](
        x_ptr=x,
        norm_ptr=norm,
        weight_ptr=weight,
        normed_ptr=normed,
        out_ptr=logits,
        eps=eps,
        K=k,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 8),
        launch_pdl=pdl,
    )
    return normed, logits


def router_logits(
    x: Tensor,  # [m, k], contiguous
    weight: Tensor,  # [n, k], contiguous
    *,
    pdl: bool = False,
) -> Tensor:
    """Return `x @ weight.T`: fp32 `[m, n]`."""
    (m, k), n = x.shape, weight.shape[0]
    _check(x, weight)
    logits = torch.empty((m, n), dtype=torch.float32, device=x.device)
    if m == 0:
        return logits
    block_m, block_n, block_k = (16, 16, 512) if m <= FEW_TOKENS else (64, 64, 128)
    _router_logits_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=logits,
        m=m,
        n=n,
        K=k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k * 2 // x.element_size(),
        STAGES=3,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return logits


def _check(x: Tensor, weight: Tensor) -> None:
    """Require operands that fit."""
    assert x.ndim == 2 and weight.shape[1] == x.shape[1], (
        f"x {tuple(x.shape)}, router {tuple(weight.shape)}: differ in k"
    )
    assert x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype, "x and router: contiguous, alike"
