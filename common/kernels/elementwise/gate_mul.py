"""Gate of a gated MLP, `activation(gate) * up`, in one pass over both halves."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.gate import ACTIVATIONS, SILU, gated

BLOCK = 1024


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * inner], contiguous, gate first
    out_ptr,  # [num_tokens, inner], contiguous
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Grid: (num_tokens, cdiv(INNER, BLOCK)). A program takes BLOCK columns of a row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    row_ptr = gate_up_ptr + token * (2 * INNER) + columns
    gate = tl.load(row_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + INNER, mask=inside, other=0.0).to(tl.float32)
    y = gated(gate, up, ACTIVATION)
    tl.store(out_ptr + token * INNER + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def gate_mul(gate_up: Tensor, activation: str = SILU) -> Tensor:
    """Return `activation(gate) * up` of contiguous `gate_up [num_tokens, 2 * inner]`: `[num_tokens, inner]`."""
    assert gate_up.ndim == 2 and gate_up.is_contiguous(), f"gate_up {tuple(gate_up.shape)}: contiguous, 2-D needed"
    assert gate_up.shape[1] % 2 == 0, f"gate_up {tuple(gate_up.shape)}: an even number of columns needed"
    assert activation in ACTIVATIONS, f"activation {activation}: one of {ACTIVATIONS} needed"
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    _gate_mul_kernel[(num_tokens, triton.cdiv(inner, BLOCK))](
        gate_up_ptr=gate_up, out_ptr=out, INNER=inner, BLOCK=BLOCK, ACTIVATION=str(activation), num_warps=4
    )
    return out
