"""Scan of the gated delta rule over the chunks of each sequence, with the overlaps of `chunk_overlaps`.

S is the state before a chunk, `[key_dim, value_dim]`; `grown[i]` is the decay from the chunk's begin to token i.

    change = inverse (v - grown (k S)).
    out    = grown (q S) + scores change.
    S      = grown[-1] S + k^T (grown[-1] / grown change).

Chunks of a sequence follow each other, so latency is the bound. Of a chunk's six products, three depend on each other.
A program takes VALUES values of a head, and keeps their part of the state in fp32 registers. All products have values
as rows. So each result is the left operand of the next without leaving the registers, and right operands are tiles as
loaded. 64 values are the rows of Hopper's matrix unit: a prompt has 64 (32 heads) or 96 programs (48 heads).

A state is read and written once a step. Operands are `heads`'s type, sums fp32. Elements read and written for a token
and value head, with keys of 128: q and k 256, v 128, overlaps 128, out 128. Programs of a key head share q and k in
the L2 cache. Products: 147,000 FLOPs. The outputs need no pass of their own. Such a pass would need the states of all
chunks: twice the bytes of q and scores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.gpu import Gpu
from common.kernels.base.ragged import first_tile
from common.kernels.delta.chunk_overlaps import CHUNK, Overlaps

VALUES = 64  # of a program
DIMS = range(16, 129)  # of a head: at least the matrix unit's, at most what registers and shared memory hold
THREE_STAGES_BYTES, WGMMA_STAGES_BYTES = 116 << 10, 180 << 10
"""Shared memory of a program that holds tiles of three chunks; of GPUs with more, the matrix units take 64 rows."""


@triton.jit(do_not_specialize=["table_stride"])
def _scan_kernel(
    heads_ptr,  # [num_tokens, 2 * NUM_K + NUM_V, DIM]: q, k and v
    inverse_ptr,  # [tiles, NUM_V, CHUNK, CHUNK]
    scores_ptr,  # [tiles, NUM_V, CHUNK, CHUNK]
    chunk_gates_ptr,  # [tiles, NUM_V, 3, CHUNK] fp32, as in `Overlaps`
    states_ptr,  # [NUM_V, VALUE_DIM, KEY_DIM] fp32 of the first block's state, others block_stride apart
    block_tables_ptr,  # [num_seqs, 1] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    is_new_ptr,  # [num_seqs] bool
    out_ptr,  # [num_tokens, NUM_V, VALUE_DIM]
    table_stride,
    block_stride,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,  # power of two, at least KEY_DIM and VALUE_DIM
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (num_seqs * NUM_V, cdiv(VALUE_DIM, VALUES))."""
    ROW: tl.constexpr = (2 * NUM_K + NUM_V) * DIM
    seq = tl.program_id(0) // NUM_V
    head = tl.program_id(0) % NUM_V
    begin = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    seq_len = tl.load(seq_lens_ptr + seq)
    if begin == end:
        return
    block = tl.load(block_tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    values = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    keys = tl.arange(0, DIM)
    rows = tl.arange(0, CHUNK)
    state_ptr = states_ptr + block * block_stride + head * (VALUE_DIM * KEY_DIM)
    in_state = (values < VALUE_DIM)[:, None] & (keys < KEY_DIM)[None, :]
    state_elements = values[:, None] * KEY_DIM + keys[None, :]
    state = tl.load(state_ptr + state_elements, mask=in_state & (seq_len > end - begin), other=0.0)
    key_head = head // (NUM_V // NUM_K)
    token_ptr = heads_ptr + begin.to(tl.int64) * ROW
    o_ptr = out_ptr + (begin.to(tl.int64) * NUM_V + head) * VALUE_DIM
    tile = first_tile(begin, seq, CHUNK).to(tl.int64) * NUM_V + head
    keyed = rows[:, None] * ROW + keys[None, :]
    square = rows[:, None] * CHUNK + rows[None, :]
    valued = rows[:, None] * ROW + values[None, :]
    for first in tl.range(0, end - begin, CHUNK, num_stages=STAGES):
        inside = first + rows < end - begin
        k = tl.load(token_ptr + (NUM_K + key_head) * DIM + keyed, mask=inside[:, None], other=0.0)
        v = tl.load(token_ptr + (2 * NUM_K + head) * DIM + valued, mask=inside[:, None], other=0.0)
        inverse = tl.load(inverse_ptr + tile * (CHUNK * CHUNK) + square)
        q = tl.load(token_ptr + key_head * DIM + keyed, mask=inside[:, None], other=0.0)
        scores = tl.load(scores_ptr + tile * (CHUNK * CHUNK) + square)
        gate_ptr = chunk_gates_ptr + tile * (3 * CHUNK)
        grown = tl.load(gate_ptr + rows)[None, :]
        rest = tl.load(gate_ptr + CHUNK + rows)[None, :]
        whole = tl.load(gate_ptr + CHUNK - 1)
        start = state.to(k.dtype)
        wrong = (tl.dot(start, tl.trans(k), input_precision="ieee") * -grown).to(k.dtype)
        change = tl.dot(tl.trans(v), tl.trans(inverse), input_precision="ieee")
        change = tl.dot(wrong, tl.trans(inverse), change, input_precision="ieee")
        kept = (change * rest).to(k.dtype)
        change = change.to(k.dtype)
        out = tl.dot(start, tl.trans(q), input_precision="ieee") * grown
        out = tl.dot(change, tl.trans(scores), out, input_precision="ieee")
        out_ptrs = o_ptr + rows[None, :] * (NUM_V * VALUE_DIM) + values[:, None]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside[None, :] & (values < VALUE_DIM)[:, None])
        state = tl.dot(kept, k, state * whole, input_precision="ieee")
        token_ptr += CHUNK * ROW
        o_ptr += CHUNK * NUM_V * VALUE_DIM
        tile += NUM_V
    is_new = tl.load(is_new_ptr + seq) != 0
    tl.store(state_ptr + state_elements, state, mask=in_state & is_new)


def is_scannable(heads: Tensor) -> bool:
    """Tell whether tiles of `heads` fit into a program: elements of two bytes, and DIMS of a head."""
    return heads.element_size() == 2 and heads.shape[2] in DIMS


class Launch(NamedTuple):
    """Warps of a program, and chunks whose tiles are in flight."""

    num_warps: int
    num_stages: int


def launch_for(gpu: Gpu) -> Launch:
    """Return a launch without spilled registers, in the loop over chunks, for 64 values and keys of 128.

    A matrix unit that takes 64 rows at once wants their four warps. Others divide the rows among eight.
    """
    if gpu.shared_bytes >= WGMMA_STAGES_BYTES:
        return Launch(4, 3)
    return Launch(8, 3 if gpu.shared_bytes >= THREE_STAGES_BYTES else 2)


def scan_chunks(
    heads: Tensor,  # as `convolve_prompts` returns them
    overlaps: Overlaps,
    weights: DeltaWeights,
    states: Tensor,  # [num_blocks, num_rows, row_elements] fp32: of the layer, strided by block
    sequences: Sequences,
    gpu: Gpu,
) -> Tensor:
    """Advance the states by new tokens; return outputs `[num_tokens, value_heads, value_dim]`.

    Outputs of tokens outside `cu_seqlens` are not written.
    """
    num_heads, num_values = weights.num_value_heads, min(VALUES, heads.shape[2])
    out = torch.empty((heads.shape[0], num_heads, weights.value_dim), dtype=heads.dtype, device=heads.device)
    launch = launch_for(gpu)
    _scan_kernel[(sequences.num_seqs * num_heads, triton.cdiv(weights.value_dim, num_values))](
        heads_ptr=heads,
        inverse_ptr=overlaps.inverse,
        scores_ptr=overlaps.scores,
        chunk_gates_ptr=overlaps.gates,
        states_ptr=states,
        cu_seqlens_ptr=sequences.cu_seqlens,
        out_ptr=out,
        **sequences.operands(states),
        **weights.sizes,
        DIM=heads.shape[2],
        VALUES=num_values,
        CHUNK=CHUNK,
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
    return out
