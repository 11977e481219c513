"""Cap of logits, `cap * tanh(logits / cap)`, in place."""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.pdl import wait_for_predecessor

BLOCK = 2048


@triton.jit
def _cap_logits_kernel(
    logits_ptr,  # [num_elements] fp32; overwritten
    num_elements,
    cap,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (cdiv(num_elements, BLOCK),)."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < num_elements
    wait_for_predecessor(PDL)
    logits = tl.load(logits_ptr + elements, mask=inside, other=0.0)
    capped = cap - 2.0 * cap / (1.0 + tl.exp(2.0 / cap * logits))  # tanh(z) is 1 less twice the sigmoid of -2 * z
    tl.store(logits_ptr + elements, capped, mask=inside)


def cap_logits(logits: Tensor, cap: float, *, pdl: bool = False) -> Tensor:
    """Cap contiguous fp32 `logits` in place; return them."""
    assert logits.is_contiguous() and logits.dtype.itemsize == 4, f"logits of {logits.dtype}: contiguous fp32 needed"
    assert cap > 0, f"cap {cap}: a positive number needed"
    if logits.numel() == 0:
        return logits
    _cap_logits_kernel[(triton.cdiv(logits.numel(), BLOCK),)](
        logits_ptr=logits, num_elements=logits.numel(), cap=cap, BLOCK=BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl
    )
    return logits
