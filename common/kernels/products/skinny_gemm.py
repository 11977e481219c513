"""Product of a few tokens and a weight matrix: tensor cores, tall tiles of weights, and K split over programs.

Up to 64 tokens take the time of reading the weights, if enough programs read at once. The tokens are the narrow side of
the product, padded to 16, 32 or 64. For few outputs, K is split as well: each part leaves fp32 sums, which the next
norm adds up.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_ending, check_product
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.tiles.ending import store_product


@triton.jit(do_not_specialize=["m"])
def _skinny_gemm_kernel(
    x_ptr,  # [m, k], contiguous
    weight_ptr,  # [n, k], contiguous; [2 * n, k] if GATED: gate, then up
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least m
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), SPLITS). A program computes BLOCK_N outputs of all tokens, over a part of K."""
    PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * PART
    tokens = tl.arange(0, BLOCK_M)
    inside_n, inside_m = rows < n, tokens < m
    weight_row_ptr = weight_ptr + rows[:, None].to(tl.int64) * K
    up_row_ptr = weight_row_ptr + n.to(tl.int64) * K
    wait_for_predecessor(PDL)

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(begin, min(begin + PART, K), BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        inside_k = columns < K
        x = tl.load(
            x_ptr + tokens[None, :] * K + columns[:, None], mask=inside_m[None, :] & inside_k[:, None], other=0.0
        )
        mask = inside_n[:, None] & inside_k[None, :]
        weight = tl.load(weight_row_ptr + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        if GATED:
            up = tl.load(up_row_ptr + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc = tl.dot(up, x, up_acc, input_precision="ieee")

    elements = tokens[None, :].to(tl.int64) * n + rows[:, None]
    inside = inside_n[:, None] & inside_m[None, :]
    store_product(
        acc, up_acc, bias_ptr, residual_ptr, out_ptr, rows, inside_n, elements, inside, m.to(tl.int64) * n, SPLITS,
        HAS_RESIDUAL, GATED, ACTIVATION,
    )  # fmt: skip


def skinny_gemm(
    x: Tensor,  # [m, k], contiguous, m up to 64
    weight: Tensor,  # [n, k], or [2 * n, k] with an activation
    out: Tensor,  # [m, n], or fp32 parts [splits, m, n]; overwritten
    *,
    block_n: int,
    block_k: int,
    stages: int,
    warps: int,
    splits: int = 1,
    residual: Tensor | None = None,  # [m, n], without splits only; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    pdl: bool = False,
) -> Tensor:
    """Write `x @ weight.T + bias`, then `+ residual` or `activation(gate) * up`, to `out`; return `out`.

    With `splits`, write parts, the first with the bias.
    """
    m, k = x.shape
    n = weight.shape[0] // (1 if activation is None else 2)
    assert 1 <= m <= 64, f"{m} tokens: 1 to 64 here"
    check_product(x, weight, out, residual, splits=splits, gated=activation is not None)
    check_ending(n, bias, activation)
    _skinny_gemm_kernel[(triton.cdiv(n, block_n), splits)](
        x_ptr=x,
        weight_ptr=weight,
        residual_ptr=out if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        m=m,
        n=n,
        K=k,
        BLOCK_M=max(16, triton.next_power_of_2(m)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        STAGES=stages,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return out
