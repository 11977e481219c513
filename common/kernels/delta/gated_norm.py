"""Gated norm behind the gated delta rule."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.pdl import wait_for_predecessor

HEADS = 8  # of a program of a prompt step


@triton.jit(do_not_specialize=["num_seqs"])
def _gated_norm_kernel(
    o_ptr,  # [num_tokens, NUM_V, VALUE_DIM]
    gate_ptr,  # gate of the first token, others ROW apart: [NUM_V, VALUE_DIM]
    norm_ptr,  # [VALUE_DIM] fp32
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    out_ptr,  # [num_tokens, NUM_V, VALUE_DIM]
    eps,
    num_seqs,
    NUM_V: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,  # power of two, at least VALUE_DIM
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens, cdiv(NUM_V, HEADS)). A program takes HEADS heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    inside = (heads < NUM_V)[:, None] & (dims < VALUE_DIM)[None, :]
    wait_for_predecessor(PDL)
    is_real = token < tl.load(cu_seqlens_ptr + num_seqs)  # no load waits for this one
    columns = heads[:, None] * VALUE_DIM + dims[None, :]
    o = tl.load(o_ptr + token * (NUM_V * VALUE_DIM) + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * ROW + columns, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + dims, mask=dims < VALUE_DIM, other=0.0)[None, :]
    o = o * tl.rsqrt(tl.sum(o * o, axis=1, keep_dims=True) / VALUE_DIM + eps) * norm
    out = tl.where(is_real, o * gate * tl.sigmoid(gate), 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * (NUM_V * VALUE_DIM) + columns, out, mask=inside)


def gated_norm(
    o: Tensor,  # [num_tokens, value_heads, value_dim]
    x: Tensor,
    weights: DeltaWeights,
    sequences: Sequences,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return `norm(o) * silu(gate)`, the gate being part of `x` as `convolve` takes it: `[num_tokens, value_width]`.

    Tokens outside `cu_seqlens` give 0.
    """
    num_tokens, num_heads = o.shape[0], weights.num_value_heads
    out = torch.empty((num_tokens, weights.value_width), dtype=x.dtype, device=x.device)
    heads = 1 if sequences.one_token_each else HEADS
    _gated_norm_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        o_ptr=o,
        gate_ptr=x[:, weights.conv.shape[0] :],
        norm_ptr=weights.norm,
        cu_seqlens_ptr=sequences.cu_seqlens,
        out_ptr=out,
        eps=weights.norm_eps,
        num_seqs=sequences.num_seqs,
        NUM_V=num_heads,
        VALUE_DIM=weights.value_dim,
        DIM=triton.next_power_of_2(weights.value_dim),
        ROW=x.shape[1],
        HEADS=heads,
        PDL=pdl,
        num_warps=1 if sequences.one_token_each else 4,
        launch_pdl=pdl,
    )
    return out
