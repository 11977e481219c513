"""Recurrence of the gated delta rule, token after token: for decode steps, and for prompts without chunks.

Values of a head are independent of each other. So a program takes some values of a head, and keeps their rows of the
state in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.pdl import wait_for_predecessor

VALUES = 16  # of a program


@triton.jit(do_not_specialize=["table_stride"])
def _recurrence_kernel(
    heads_ptr,  # [num_tokens, 2 * NUM_K + NUM_V, DIM]: q, k and v
    gates_ptr,  # [num_tokens, NUM_V, 2] fp32: logarithm of the decay, and beta
    states_ptr,  # [NUM_V, VALUE_DIM, KEY_DIM] fp32 of the first block's state, others block_stride apart
    block_tables_ptr,  # [num_seqs, 1] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    is_new_ptr,  # [num_seqs] bool
    out_ptr,  # [num_tokens, NUM_V, VALUE_DIM] fp32
    table_stride,
    block_stride,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,  # power of two, at least KEY_DIM and VALUE_DIM
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_seqs * NUM_V, cdiv(VALUE_DIM, VALUES))."""
    seq = tl.program_id(0) // NUM_V
    head = tl.program_id(0) % NUM_V
    values = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    keys = tl.arange(0, DIM)
    wait_for_predecessor(PDL)
    seq_len = tl.load(seq_lens_ptr + seq)
    begin = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    o_ptr = out_ptr + (begin.to(tl.int64) * NUM_V + head) * VALUE_DIM + values
    if seq_len == 0:
        for _ in range(begin, end):
            tl.store(o_ptr, tl.zeros((VALUES,), tl.float32), mask=values < VALUE_DIM)
            o_ptr += NUM_V * VALUE_DIM
        return
    is_new = tl.load(is_new_ptr + seq) != 0
    block = tl.load(block_tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    inside = (values < VALUE_DIM)[:, None] & (keys < KEY_DIM)[None, :]
    tile = (head * VALUE_DIM + values)[:, None] * KEY_DIM + keys[None, :]
    state_ptr = states_ptr + block * block_stride + tile
    has_state = seq_len > end - begin
    state = tl.load(state_ptr, mask=inside & has_state, other=0.0)
    key_head = head // (NUM_V // NUM_K)
    row_ptr = heads_ptr + begin.to(tl.int64) * ((2 * NUM_K + NUM_V) * DIM)
    gate_ptr = gates_ptr + (begin.to(tl.int64) * NUM_V + head) * 2
    for _ in range(begin, end):
        q = tl.load(row_ptr + key_head * DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        k = tl.load(row_ptr + (NUM_K + key_head) * DIM + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
        v = tl.load(row_ptr + (2 * NUM_K + head) * DIM + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
        decay = tl.where(is_new, tl.exp(tl.load(gate_ptr)), 1.0)
        beta = tl.where(is_new, tl.load(gate_ptr + 1), 0.0)
        state = state * decay
        change = beta * (v - tl.sum(state * k[None, :], axis=1))
        state = state + change[:, None] * k[None, :]
        tl.store(o_ptr, tl.sum(state * q[None, :], axis=1), mask=values < VALUE_DIM)
        row_ptr += (2 * NUM_K + NUM_V) * DIM
        gate_ptr += NUM_V * 2
        o_ptr += NUM_V * VALUE_DIM
    tl.store(state_ptr, state, mask=inside & is_new)


def recur(
    heads: Tensor,  # as `convolve` or `convolve_prompts` returns them, like gates
    gates: Tensor,
    weights: DeltaWeights,
    states: Tensor,  # [num_blocks, num_rows, row_elements] fp32: of the layer, strided by block
    sequences: Sequences,
    *,
    pdl: bool = False,
) -> Tensor:
    """Advance the states by new tokens; return outputs `[num_tokens, value_heads, value_dim]` fp32.

    Outputs of padding sequences are 0; outputs of tokens outside `cu_seqlens` are not written.
    """
    num_tokens, num_heads = heads.shape[0], weights.num_value_heads
    out = torch.empty((num_tokens, num_heads, weights.value_dim), dtype=torch.float32, device=heads.device)
    _recurrence_kernel[(sequences.num_seqs * num_heads, triton.cdiv(weights.value_dim, VALUES))](
        heads_ptr=heads,
        gates_ptr=gates,
        states_ptr=states,
        cu_seqlens_ptr=sequences.cu_seqlens,
        out_ptr=out,
        **sequences.operands(states),
        **weights.sizes,
        DIM=heads.shape[2],
        VALUES=VALUES,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return out
