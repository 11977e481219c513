"""Product of a few tokens and a weight matrix: tensor cores, tall tiles of weights, and K split over programs.

Up to 64 tokens take the time of reading the weights, if enough programs read at once. The tokens are the narrow side of
the product, padded to 16, 32 or 64. For few outputs, K is split as well: each part leaves fp32 sums, which the next
norm adds up.

Both operands may be codes of 8 bits, with half the bytes to read. Signed bytes are multiplied as they are. e4m3 is
widened to fp16, exactly and by integer arithmetic, because GPUs before 8.9 multiply nothing narrower. Sums of codes are
exact or fp32; scales are applied to the finished sums, or to those of each group of columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_codes, check_ending, check_product
from common.kernels.base.codes import GROUP, check_scales, e4m3_halves, readable
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.tiles.ending import store_product

MAX_TOKENS = 64
SQUARE = tl.constexpr(65536.0)  # halves of both operands are divided by 256


@triton.jit
def _multiply(weight, x, acc):
    """Add the product of a tile of weights and of one of tokens; uint8 is taken for e4m3."""
    if weight.dtype == tl.uint8:
        acc = tl.dot(e4m3_halves(weight), e4m3_halves(x), acc)
    elif weight.dtype == tl.int8:
        acc = tl.dot(weight, x, acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled(sums, weight_scales, x_scales):
    """Return sums of codes `[BLOCK_N, BLOCK_M]` in fp32, times the scales of rows and tokens."""
    scaled = sums.to(tl.float32) * weight_scales[:, None] * x_scales[None, :]
    if sums.dtype == tl.float32:
        scaled *= SQUARE
    return scaled


@triton.jit(do_not_specialize=["m"])
def _skinny_gemm_kernel(
    x_ptr,  # [m, k], contiguous
    x_scales_ptr,  # of codes: [m] fp32, or [groups, m] if GROUPED; else None
    weight_ptr,  # [n, k], contiguous, as x; [2 * n, k] if GATED: gate, then up
    scales_ptr,  # of codes: [n] fp32, or [cdiv(n, SCALE_ROWS), groups] if GROUPED; twice the rows if GATED; else None
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least m
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # GROUP if GROUPED
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(n, BLOCK_N), SPLITS). A program computes BLOCK_N outputs of all tokens, over a part of K."""
    PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    GROUPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SUMS: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * PART
    tokens = tl.arange(0, BLOCK_M)
    inside_n, inside_m = rows < n, tokens < m
    weight_row_ptr = weight_ptr + rows[:, None].to(tl.int64) * K
    up_row_ptr = weight_row_ptr + n.to(tl.int64) * K
    wait_for_predecessor(PDL)

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32 if GROUPED else SUMS)
    up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32 if GROUPED else SUMS)
    for start in tl.range(begin, min(begin + PART, K), BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        inside_k = columns < K
        x = tl.load(x_ptr + tokens[None, :] * K + columns[:, None], mask=inside_m[None, :] & inside_k[:, None], other=0)
        mask = inside_n[:, None] & inside_k[None, :]
        weight = tl.load(weight_row_ptr + columns[None, :], mask=mask, other=0, eviction_policy="evict_first")
        if GROUPED:
            group = start // BLOCK_K
            x_scales = tl.load(x_scales_ptr + group * m + tokens, mask=inside_m, other=0.0)
            sums = _multiply(weight, x, tl.zeros((BLOCK_N, BLOCK_M), SUMS))
            scales = tl.load(scales_ptr + rows // SCALE_ROWS * GROUPS + group, mask=inside_n, other=0.0)
            acc += _scaled(sums, scales, x_scales)
        else:
            acc = _multiply(weight, x, acc)
        if GATED:
            up = tl.load(up_row_ptr + columns[None, :], mask=mask, other=0, eviction_policy="evict_first")
            if GROUPED:
                sums = _multiply(up, x, tl.zeros((BLOCK_N, BLOCK_M), SUMS))
                scales = tl.load(scales_ptr + (n + rows) // SCALE_ROWS * GROUPS + group, mask=inside_n, other=0.0)
                up_acc += _scaled(sums, scales, x_scales)
            else:
                up_acc = _multiply(up, x, up_acc)

    y, up_y = acc, up_acc
    if scales_ptr is not None and not GROUPED:
        x_scales = tl.load(x_scales_ptr + tokens, mask=inside_m, other=0.0)
        y = _scaled(acc, tl.load(scales_ptr + rows, mask=inside_n, other=0.0), x_scales)
        if GATED:
            up_y = _scaled(up_acc, tl.load(scales_ptr + n + rows, mask=inside_n, other=0.0), x_scales)
    elements = tokens[None, :].to(tl.int64) * n + rows[:, None]
    inside = inside_n[:, None] & inside_m[None, :]
    store_product(
        y, up_y, bias_ptr, residual_ptr, out_ptr, rows, inside_n, elements, inside, m.to(tl.int64) * n, SPLITS,
        HAS_RESIDUAL, GATED, ACTIVATION,
    )  # fmt: skip


def skinny_gemm(
    x: Tensor,  # [m, k], contiguous, m up to MAX_TOKENS
    weight: Tensor,  # [n, k] of the same dtype, or [2 * n, k] with an activation
    out: Tensor,  # [m, n], or fp32 parts [splits, m, n]; overwritten
    *,
    block_n: int,
    block_k: int,
    stages: int,
    warps: int,
    x_scales: Tensor | None = None,  # of codes: fp32 [m, 1] or [m, groups], with contiguous columns
    scales: Tensor | None = None,  # of codes: fp32 of rows or of groups, as x_scales has them
    splits: int = 1,
    residual: Tensor | None = None,  # [m, n], without splits only; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    pdl: bool = False,
) -> Tensor:
    """Write `x @ weight.T + bias`, then `+ residual` or `activation(gate) * up`, to `out`; return `out`.

    With `splits`, write parts, the first with the bias. With scales of groups, `block_k` is ignored.
    """
    (m, k), n = x.shape, weight.shape[0] // (1 if activation is None else 2)
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    is_grouped, scale_rows = False, 1
    if scales is None or x_scales is None:
        check_product(x, weight, out, residual, splits=splits, gated=activation is not None)
    else:
        check_codes(x, weight, out, residual, splits=splits, gated=activation is not None)
        is_grouped, scale_rows = check_scales(x_scales, weight, scales)
    check_ending(n, bias, activation)
    _skinny_gemm_kernel[(triton.cdiv(n, block_n), splits)](
        x_ptr=readable(x, has_e4m3=False),
        x_scales_ptr=None if x_scales is None else x_scales.t(),
        weight_ptr=readable(weight, has_e4m3=False),
        scales_ptr=scales,
        residual_ptr=out if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        m=m,
        n=n,
        K=k,
        BLOCK_M=max(16, triton.next_power_of_2(m)),
        BLOCK_N=block_n,
        BLOCK_K=GROUP if is_grouped else block_k,
        SPLITS=splits,
        STAGES=stages,
        GROUPED=is_grouped,
        SCALE_ROWS=scale_rows,
        HAS_RESIDUAL=residual is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return out
