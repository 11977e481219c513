"""Convolution of prompts over each token's last inputs, and what follows by head: SiLU, unit lengths, gates.

Bound by memory: an activation is read once and written once. A program takes a tile of tokens (`ragged`) and a head.
So weights of the convolution are read once a tile, and the rows of a tile's taps overlap in the L1 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.ragged import max_seqs_for, num_tiles, tile_of
from common.kernels.delta.convolution import activated, empty_heads, store_gates

TOKENS = 32  # of a tile
CHANNELS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _convolve_prompts_kernel(
    x_ptr,  # [num_tokens, CHANNELS + VALUE_WIDTH + 2 * NUM_V], contiguous
    conv_ptr,  # [CHANNELS, WIDTH] fp32
    decay_ptr,  # [NUM_V] fp32
    dt_bias_ptr,  # [NUM_V] fp32
    seen_ptr,  # [WIDTH, CHANNELS] fp32 of the first block's state, others block_stride apart
    block_tables_ptr,  # [num_seqs, 1] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    is_new_ptr,  # [num_seqs] bool
    heads_ptr,  # [num_tokens, 2 * NUM_K + NUM_V, DIM]: q, k and v
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
    TOKENS: tl.constexpr,
):
    """Grid: (2 * NUM_K + NUM_V, tiles). Programs next to each other read the same rows."""
    CHANNELS: tl.constexpr = 2 * NUM_K * KEY_DIM + NUM_V * VALUE_DIM
    ROW: tl.constexpr = CHANNELS + NUM_V * VALUE_DIM + 2 * NUM_V
    head = tl.program_id(0)
    tile = tl.program_id(1)
    seq, begin, end, first = tile_of(tile, cu_seqlens_ptr, tl.arange(0, MAX_SEQS), num_seqs, TOKENS)
    seq_len = tl.load(seq_lens_ptr + seq)
    if (first >= end) | (seq_len == 0):
        return
    has_state = seq_len > end - begin
    is_new = tl.load(is_new_ptr + seq) != 0
    block = tl.load(block_tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    is_value = head >= 2 * NUM_K
    which = head - 2 * NUM_K
    dims = tl.arange(0, DIM)
    is_own = dims < tl.where(is_value, VALUE_DIM, KEY_DIM)
    inside = is_own[None, :]
    channels = tl.where(is_value, 2 * NUM_K * KEY_DIM + which * VALUE_DIM, head * KEY_DIM) + dims
    tokens = first + tl.arange(0, TOKENS)
    rows_ptr = x_ptr + tokens.to(tl.int64)[:, None] * ROW
    state_ptr = seen_ptr + block * block_stride + channels[None, :]
    y = tl.zeros((TOKENS, DIM), tl.float32)
    for tap in tl.static_range(WIDTH):
        from_begin = tokens - (WIDTH - 1 - tap) - begin
        in_x = is_new & (from_begin >= 0) & (tokens < end)
        ptr = rows_ptr - (WIDTH - 1 - tap) * ROW + channels[None, :]
        value = tl.load(ptr, mask=in_x[:, None] & inside, other=0.0).to(tl.float32)
        if (is_new == 0) | (has_state & (first == begin)):
            in_state = (is_new == 0) | (from_begin < 0)
            row = tl.where(is_new, WIDTH + from_begin, tap)
            value += tl.load(state_ptr + row[:, None] * CHANNELS, mask=in_state[:, None] & inside, other=0.0)
        y += value * tl.load(conv_ptr + channels * WIDTH + tap, mask=is_own, other=0.0)[None, :]
    y = tl.where(inside, activated(y, head, NUM_K, KEY_DIM), 0.0)
    present = tokens < end
    out_ptr = heads_ptr + (tokens.to(tl.int64)[:, None] * (2 * NUM_K + NUM_V) + head) * DIM + dims[None, :]
    tl.store(out_ptr, y.to(heads_ptr.dtype.element_ty), mask=present[:, None])
    if is_value:
        raw_ptr = x_ptr + tokens.to(tl.int64) * ROW + (CHANNELS + NUM_V * VALUE_DIM + which)
        out_gates_ptr = gates_ptr + (tokens.to(tl.int64) * NUM_V + which) * 2
        store_gates(raw_ptr, decay_ptr + which, dt_bias_ptr + which, out_gates_ptr, present, NUM_V)


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
):
    """Grid: (num_seqs, cdiv(CHANNELS, BLOCK)). A program takes the last inputs of some channels of a sequence."""
    seq = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
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


def convolve_prompts(
    x: Tensor,  # [num_tokens, channels + value_width + 2 * value_heads], contiguous
    weights: DeltaWeights,
    states: Tensor,  # [num_blocks, num_rows, row_elements] fp32: of the layer, strided by block
    sequences: Sequences,
) -> tuple[Tensor, Tensor]:
    """Return q, k and v by head `[num_tokens, 2 * key_heads + value_heads, dim]`, and gates; keep last inputs.

    Dimensions beyond a head's own are 0. Gates are `[num_tokens, value_heads, 2]` fp32: logarithm of the decay, and
    beta. Nothing is written for padding, in or outside `cu_seqlens`.
    """
    channels, _, width = weights.conv.shape
    heads, gates = empty_heads(x, weights, x.dtype)
    seen = states[:, weights.num_value_heads]
    _convolve_prompts_kernel[(weights.num_heads, num_tiles(x.shape[0], sequences.num_seqs, TOKENS))](
        x_ptr=x,
        conv_ptr=weights.conv,
        decay_ptr=weights.decay,
        dt_bias_ptr=weights.dt_bias,
        seen_ptr=seen,
        cu_seqlens_ptr=sequences.cu_seqlens,
        heads_ptr=heads,
        gates_ptr=gates,
        num_seqs=sequences.num_seqs,
        **sequences.operands(states),
        **weights.sizes,
        WIDTH=width,
        DIM=heads.shape[2],
        MAX_SEQS=max_seqs_for(sequences.num_seqs),
        TOKENS=TOKENS,
        num_warps=4,
    )
    _keep_inputs_kernel[(sequences.num_seqs, triton.cdiv(channels, CHANNELS_AT_ONCE))](
        x_ptr=x,
        seen_ptr=seen,
        cu_seqlens_ptr=sequences.cu_seqlens,
        **sequences.operands(states),
        CHANNELS=channels,
        ROW=x.shape[1],
        WIDTH=width,
        BLOCK=CHANNELS_AT_ONCE,
        num_warps=4,
    )
    return heads, gates
