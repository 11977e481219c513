"""End of a product, rows of outputs by columns of tokens: bias, gate, residual, and the place of the result."""

import triton
import triton.language as tl

from common.kernels.base.gate import gated


@triton.jit
def store_product(
    acc,  # [rows, tokens] fp32
    up_acc,  # as acc, if GATED
    bias_ptr,  # [n], or None
    residual_ptr,  # as out_ptr, if HAS_RESIDUAL
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    rows,
    inside_n,
    elements,  # places in [m, n]
    inside,
    num_elements,  # m * n
    SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store sums over a part of K, that of `program_id(1)`; the first part has the bias. Callable from Gluon."""
    part = tl.program_id(1)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, mask=inside_n & (part == 0), other=0.0)  # counted once
        acc += bias.to(tl.float32)[:, None]
    if SPLITS > 1:
        tl.store(out_ptr + part.to(tl.int64) * num_elements + elements, acc, mask=inside)
    else:
        if GATED:
            acc = gated(acc, up_acc, ACTIVATION)
        if HAS_RESIDUAL:
            acc += tl.load(residual_ptr + elements, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + elements, acc.to(out_ptr.dtype.element_ty), mask=inside)
