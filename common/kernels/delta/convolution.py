"""Convolution over a token's last inputs, and what follows by head: SiLU, unit length of Q and K, gates."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.base.ragged import max_seqs_for

CHANNELS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _convolve_kernel(
    x_ptr,  # [num_tokens, CHANNELS + VALUE_WIDTH + 2 * NUM_V], contiguous
    conv_ptr,  # [CHANNELS, WIDTH] fp32
    decay_ptr,  # [NUM_V] fp32
    dt_bias_ptr,  # [NUM_V] fp32
    seen_ptr,  # [WIDTH, CHANNELS] fp32 of the first block's state, others block_stride apart
    block_tables_ptr,  # [num_seqs, 1] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    is_new_ptr,  # [num_seqs] bool
    heads_ptr,  # [num_tokens, 2 * NUM_K + NUM_V, DIM] fp32: q, k and v
    gates_ptr,  # [num_tokens, NUM_V, 2] fp32: logarithm of the decay, and beta
    num_seqs,
    table_stride,
    block_stride,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,  # power of two, at least KEY_DIM and VALUE_DIM
    MAX_SEQS: tl.constexpr,
    ONE_TOKEN_EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens, 2 * NUM_K + NUM_V). A program takes a head of a token; in a decode step it keeps the input."""
    CHANNELS: tl.constexpr = 2 * NUM_K * KEY_DIM + NUM_V * VALUE_DIM
    ROW: tl.constexpr = CHANNELS + NUM_V * VALUE_DIM + 2 * NUM_V
    token = tl.program_id(0)
    head = tl.program_id(1)
    is_value = head >= 2 * NUM_K
    wait_for_predecessor(PDL)
    if ONE_TOKEN_EACH:
        seq = token
    else:
        seqs = tl.arange(0, MAX_SEQS)
        ends = tl.load(cu_seqlens_ptr + 1 + seqs, mask=seqs < num_seqs, other=1 << 30)
        seq = tl.sum((ends <= token).to(tl.int32), axis=0)
    if seq >= num_seqs:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    if seq_len == 0:
        return
    begin = tl.load(cu_seqlens_ptr + seq)
    starts_empty = seq_len == tl.load(cu_seqlens_ptr + seq + 1) - begin
    is_new = tl.load(is_new_ptr + seq) != 0
    block = tl.load(block_tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    dims = tl.arange(0, DIM)
    inside = dims < tl.where(is_value, VALUE_DIM, KEY_DIM)
    first = tl.where(is_value, 2 * NUM_K * KEY_DIM + (head - 2 * NUM_K) * VALUE_DIM, head * KEY_DIM)
    channels = first + dims
    state_ptr = seen_ptr + block * block_stride + channels
    token_ptr = x_ptr + token.to(tl.int64) * ROW
    y = tl.zeros((DIM,), tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap  # tokens before this one
        in_x = is_new & (token - back >= begin)
        row = tl.where(is_new, WIDTH + token - back - begin, tap)
        in_state = (is_new == 0) | ((token - back < begin) & (starts_empty == 0))
        value = tl.load(token_ptr - back * ROW + channels, mask=inside & in_x, other=0.0).to(tl.float32)
        value += tl.load(state_ptr + row * CHANNELS, mask=inside & in_state, other=0.0)
        y += value * tl.load(conv_ptr + channels * WIDTH + tap, mask=inside, other=0.0)
        if ONE_TOKEN_EACH:  # tap `tap` is read before, and the next one after, its place is written
            tl.store(state_ptr + tap * CHANNELS, value, mask=inside & is_new)
    y = y * tl.sigmoid(y)
    if is_value == 0:
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) + 1e-6)
        if head < NUM_K:
            y = y * (KEY_DIM**-0.5)
    tl.store(heads_ptr + (token.to(tl.int64) * (2 * NUM_K + NUM_V) + head) * DIM + dims, y, mask=inside)
    if is_value:
        which = head - 2 * NUM_K
        gate_ptr = token_ptr + CHANNELS + NUM_V * VALUE_DIM + which
        beta = tl.sigmoid(tl.load(gate_ptr).to(tl.float32))
        raised = tl.load(gate_ptr + NUM_V).to(tl.float32) + tl.load(dt_bias_ptr + which)
        soft = tl.where(raised > 20.0, raised, tl.log(1.0 + tl.exp(tl.minimum(raised, 20.0))))
        out_ptr = gates_ptr + (token.to(tl.int64) * NUM_V + which) * 2
        tl.store(out_ptr, -tl.exp(tl.load(decay_ptr + which)) * soft)
        tl.store(out_ptr + 1, beta)


@triton.jit(do_not_specialize=["table_stride"])
def _keep_inputs_kernel(
    x_ptr,  # as in the kernel above, like all of the same name
    seen_ptr,
    block_tables_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    is_new_ptr,
    table_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    ROW: tl.constexpr,  # elements of a token in x
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_seqs, cdiv(CHANNELS, BLOCK)). A program takes the last inputs of some channels of a sequence."""
    seq = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    wait_for_predecessor(PDL)
    seq_len = tl.load(seq_lens_ptr + seq)
    begin = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    if (tl.load(is_new_ptr + seq) == 0) | (seq_len == 0):
        return
    block = tl.load(block_tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    state_ptr = seen_ptr + block * block_stride + channels
    for tap in tl.static_range(WIDTH):  # what is read lies behind what has been written
        token = end - WIDTH + tap
        in_x = token >= begin
        in_state = (token < begin) & (seq_len > end - begin)
        value = tl.load(x_ptr + token.to(tl.int64) * ROW + channels, mask=inside & in_x, other=0.0).to(tl.float32)
        value += tl.load(state_ptr + (tap + end - begin) * CHANNELS, mask=inside & in_state, other=0.0)
        tl.store(state_ptr + tap * CHANNELS, value, mask=inside)


def convolve(
    x: Tensor,  # [num_tokens, channels + value_width + 2 * value_heads], contiguous
    weights: DeltaWeights,
    states: Tensor,  # [num_blocks, num_rows, row_elements] fp32: of the layer, strided by block
    sequences: Sequences,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q, k and v by head `[num_tokens, 2 * key_heads + value_heads, dim]` fp32, and gates; keep last inputs.

    Gates are `[num_tokens, value_heads, 2]` fp32: logarithm of the decay, and beta. Nothing is written for padding.
    """
    num_tokens, channels, width = x.shape[0], weights.conv.shape[0], weights.conv.shape[2]
    num_heads = 2 * weights.num_key_heads + weights.num_value_heads
    assert x.is_contiguous() and x.shape[1] == channels + weights.value_width + 2 * weights.num_value_heads
    dim = triton.next_power_of_2(max(weights.key_dim, weights.value_dim))
    heads = torch.empty((num_tokens, num_heads, dim), dtype=torch.float32, device=x.device)
    gates = torch.empty((num_tokens, weights.num_value_heads, 2), dtype=torch.float32, device=x.device)
    seen = states[:, weights.num_value_heads]
    _convolve_kernel[(num_tokens, num_heads)](
        x_ptr=x,
        conv_ptr=weights.conv,
        decay_ptr=weights.decay,
        dt_bias_ptr=weights.dt_bias,
        seen_ptr=seen,
        block_tables_ptr=sequences.block_table,
        cu_seqlens_ptr=sequences.cu_seqlens,
        seq_lens_ptr=sequences.seq_lens,
        is_new_ptr=sequences.is_new,
        heads_ptr=heads,
        gates_ptr=gates,
        num_seqs=sequences.num_seqs,
        table_stride=sequences.block_table.stride(0),
        block_stride=states.stride(0),
        NUM_K=weights.num_key_heads,
        NUM_V=weights.num_value_heads,
        KEY_DIM=weights.key_dim,
        VALUE_DIM=weights.value_dim,
        WIDTH=width,
        DIM=dim,
        MAX_SEQS=max_seqs_for(sequences.num_seqs),
        ONE_TOKEN_EACH=sequences.one_token_each,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    if not sequences.one_token_each:
        _keep_inputs_kernel[(sequences.num_seqs, triton.cdiv(channels, CHANNELS_AT_ONCE))](
            x_ptr=x,
            seen_ptr=seen,
            block_tables_ptr=sequences.block_table,
            cu_seqlens_ptr=sequences.cu_seqlens,
            seq_lens_ptr=sequences.seq_lens,
            is_new_ptr=sequences.is_new,
            table_stride=sequences.block_table.stride(0),
            block_stride=states.stride(0),
            CHANNELS=channels,
            ROW=x.shape[1],
            WIDTH=width,
            BLOCK=CHANNELS_AT_ONCE,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return heads, gates
