"""Convolution over a token's last inputs, and what follows by head: SiLU, unit length of Q and K, gates.

Decode steps; `prompt_convolution` serves prompts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.delta_operands import DeltaWeights, Sequences
from common.kernels.base.pdl import wait_for_predecessor


@triton.jit
def activated(y, head, NUM_K: tl.constexpr, KEY_DIM: tl.constexpr):
    """Return SiLU of `y [.., DIM]`, convolved channels of a head; Q and K get unit length, and Q the softmax scale."""
    y = y * tl.sigmoid(y)
    if head < 2 * NUM_K:
        y = y * tl.rsqrt(tl.sum(y * y, axis=-1, keep_dims=True) + 1e-6)
        if head < NUM_K:
            y = y * (KEY_DIM**-0.5)
    return y


@triton.jit
def store_gates(
    x_ptr,  # beta and decay of tokens before their activation, NUM_V elements apart
    rate_ptr,  # a head's rate, as a logarithm, and its bias
    bias_ptr,
    gates_ptr,  # of these tokens and this head: logarithm of the decay, and beta
    mask,
    NUM_V: tl.constexpr,
):
    beta = tl.sigmoid(tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32))
    raised = tl.load(x_ptr + NUM_V, mask=mask, other=0.0).to(tl.float32) + tl.load(bias_ptr)
    soft = tl.where(raised > 20.0, raised, tl.log(1.0 + tl.exp(tl.minimum(raised, 20.0))))
    tl.store(gates_ptr, -tl.exp(tl.load(rate_ptr)) * soft, mask=mask)
    tl.store(gates_ptr + 1, beta, mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _convolve_kernel(
    x_ptr,  # [num_seqs, CHANNELS + VALUE_WIDTH + 2 * NUM_V], contiguous
    conv_ptr,  # [CHANNELS, WIDTH] fp32
    decay_ptr,  # [NUM_V] fp32
    dt_bias_ptr,  # [NUM_V] fp32
    seen_ptr,  # [WIDTH, CHANNELS] fp32 of the first block's state, others block_stride apart
    block_tables_ptr,  # [num_seqs, 1] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    is_new_ptr,  # [num_seqs] bool
    heads_ptr,  # [num_seqs, 2 * NUM_K + NUM_V, DIM] fp32: q, k and v
    gates_ptr,  # [num_seqs, NUM_V, 2] fp32: logarithm of the decay, and beta
    table_stride,
    block_stride,
    NUM_K: tl.constexpr,
    NUM_V: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,  # power of two, at least KEY_DIM and VALUE_DIM
    PDL: tl.constexpr,
):
    """Grid: (num_seqs, 2 * NUM_K + NUM_V). A program takes a head of a sequence's token, and keeps the input."""
    CHANNELS: tl.constexpr = 2 * NUM_K * KEY_DIM + NUM_V * VALUE_DIM
    ROW: tl.constexpr = CHANNELS + NUM_V * VALUE_DIM + 2 * NUM_V
    seq = tl.program_id(0)
    head = tl.program_id(1)
    is_value = head >= 2 * NUM_K
    wait_for_predecessor(PDL)
    seq_len = tl.load(seq_lens_ptr + seq)
    if seq_len == 0:
        return
    is_new = tl.load(is_new_ptr + seq) != 0
    block = tl.load(block_tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    dims = tl.arange(0, DIM)
    inside = dims < tl.where(is_value, VALUE_DIM, KEY_DIM)
    first = tl.where(is_value, 2 * NUM_K * KEY_DIM + (head - 2 * NUM_K) * VALUE_DIM, head * KEY_DIM)
    channels = first + dims
    state_ptr = seen_ptr + block * block_stride + channels
    token_ptr = x_ptr + seq.to(tl.int64) * ROW
    y = tl.zeros((DIM,), tl.float32)
    for tap in tl.static_range(WIDTH):
        in_x = is_new & (tap == WIDTH - 1)
        in_state = (is_new == 0) | ((tap < WIDTH - 1) & (seq_len > 1))
        row = tl.where(is_new, tap + 1, tap)
        value = tl.load(token_ptr + channels, mask=inside & in_x, other=0.0).to(tl.float32)
        value += tl.load(state_ptr + row * CHANNELS, mask=inside & in_state, other=0.0)
        y += value * tl.load(conv_ptr + channels * WIDTH + tap, mask=inside, other=0.0)
        # Tap `tap` is read before, and the next one after, its place is written.
        tl.store(state_ptr + tap * CHANNELS, value, mask=inside & is_new)
    y = activated(y, head, NUM_K, KEY_DIM)
    tl.store(heads_ptr + (seq.to(tl.int64) * (2 * NUM_K + NUM_V) + head) * DIM + dims, y, mask=inside)
    if is_value:
        which = head - 2 * NUM_K
        raw_ptr = token_ptr + CHANNELS + NUM_V * VALUE_DIM + which
        out_ptr = gates_ptr + (seq.to(tl.int64) * NUM_V + which) * 2
        store_gates(raw_ptr, decay_ptr + which, dt_bias_ptr + which, out_ptr, True, NUM_V)


def empty_heads(x: Tensor, weights: DeltaWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return memory for the heads and gates of each token of `x`, of which the shape is checked."""
    num_tokens, width = x.shape[0], weights.conv.shape[0] + weights.value_width + 2 * weights.num_value_heads
    assert x.is_contiguous() and x.shape[1] == width, f"x {tuple(x.shape)}: contiguous rows of {width} needed"
    dim = triton.next_power_of_2(max(weights.key_dim, weights.value_dim))
    heads = torch.empty((num_tokens, weights.num_heads, dim), dtype=dtype, device=x.device)
    return heads, torch.empty((num_tokens, weights.num_value_heads, 2), dtype=torch.float32, device=x.device)


def convolve(
    x: Tensor,  # [num_seqs, channels + value_width + 2 * value_heads], contiguous
    weights: DeltaWeights,
    states: Tensor,  # [num_blocks, num_rows, row_elements] fp32: of the layer, strided by block
    sequences: Sequences,  # of a token each
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q, k and v by head `[num_seqs, 2 * key_heads + value_heads, dim]` fp32, and gates; keep last inputs.

    Gates are `[num_seqs, value_heads, 2]` fp32: logarithm of the decay, and beta. Nothing is written for padding.
    """
    heads, gates = empty_heads(x, weights, torch.float32)
    _convolve_kernel[(x.shape[0], weights.num_heads)](
        x_ptr=x,
        conv_ptr=weights.conv,
        decay_ptr=weights.decay,
        dt_bias_ptr=weights.dt_bias,
        seen_ptr=states[:, weights.num_value_heads],
        heads_ptr=heads,
        gates_ptr=gates,
        **sequences.operands(states),
        **weights.sizes,
        WIDTH=weights.conv.shape[2],
        DIM=heads.shape[2],
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return heads, gates
