"""Gated delta rule in plain torch: the law of its kernels, and the CPU backend.

A layer's state of a sequence is rows of `key_dim * value_dim` fp32 elements. First comes a matrix
`[value_dim, key_dim]` for each value head, then the last inputs of the convolution `[conv_width, channels]`. In layer 0
the last row begins with the number of tokens that the state has seen, equal for all layers. When a grammar's mask was
late, a token is run again that the state has seen. The token's output then follows from the state, and the state stays
as it is.
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.delta_operands import DeltaWeights
from common.ops.base import ForwardBatch

CHUNK_TOKENS = 64


def begin_states(states: Tensor, block_table: Tensor, batch: ForwardBatch) -> Tensor:
    """Tell which sequences bring tokens that their states have not seen, and count these tokens: `[num_seqs]` bool.

    Args:
        states: `[num_blocks, num_layers, 1, 1, num_rows, row_elements]`.
        block_table: `[num_seqs, 1]`.
    """
    lengths = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    starts, counts = batch.seq_lens - lengths, states[:, 0, 0, 0, -1, 0]
    is_real = (batch.seq_lens > 0) & (lengths > 0)
    blocks = block_table[:, 0].long().clamp(min=0)
    is_new = is_real & ((starts == 0) | (counts[blocks] == starts))
    counts[blocks[is_new]] = batch.seq_lens[is_new].float()
    return is_new


def delta_rule(
    x: Tensor,  # [num_tokens, channels + value_width + 2 * value_heads]: convolved, gate, beta, decay
    weights: DeltaWeights,
    states: Tensor,  # [num_blocks, num_rows, row_elements] fp32, strided: states of a layer
    block_table: Tensor,  # [num_seqs, 1]
    batch: ForwardBatch,
    is_new: Tensor,  # [num_seqs] bool
) -> Tensor:
    """Advance the states by new tokens; return the gated output `[num_tokens, value_width]`, zeros for padding."""
    out = x.new_zeros((x.shape[0], weights.value_width))
    bounds, seq_lens = batch.cu_seqlens.tolist(), batch.seq_lens.tolist()
    for seq, (block, new) in enumerate(zip(block_table[:, 0].tolist(), is_new.tolist(), strict=True)):
        begin, end = bounds[seq], bounds[seq + 1]
        if seq_lens[seq] and begin < end:
            starts_empty = seq_lens[seq] == end - begin
            out[begin:end] = _sequence(x[begin:end].float(), weights, states[block], starts_empty, new).to(x.dtype)
    return out


def _sequence(x: Tensor, weights: DeltaWeights, rows: Tensor, starts_empty: bool, is_new: bool) -> Tensor:
    """Run the tokens of a sequence over its state `rows`."""
    num_heads, channels, width = weights.num_value_heads, weights.conv.shape[0], weights.conv.shape[2]
    inputs, z, b, a = x.split([channels, weights.value_width, num_heads, num_heads], dim=1)
    state = rows[:num_heads].view(num_heads, weights.value_dim, weights.key_dim)
    seen = rows[num_heads:-1].reshape(-1)[: width * channels].view(width, channels)
    if starts_empty:
        state, seen = torch.zeros_like(state), torch.zeros_like(seen)
    inputs = torch.cat((seen, inputs)) if is_new else seen
    windows = inputs[-(x.shape[0] + width - 1) :].unfold(0, width, 1)  # [num_tokens, channels, width]
    q, k, v = _heads(functional.silu((windows * weights.conv[:, 0]).sum(-1)), weights)
    if is_new:
        decay = -weights.decay.exp() * functional.softplus(a + weights.dt_bias)
        o, state = advance(q, k, v, decay, b.sigmoid(), state)
        rows[:num_heads] = state.reshape(num_heads, -1)
        flat = inputs[-width:].reshape(-1)
        rows[num_heads:-1].view(-1)[: len(flat)] = flat
    else:
        o = torch.einsum("hvk,thk->thv", state, q)
    scale = (o.square().mean(-1, keepdim=True) + weights.norm_eps).rsqrt()
    return (o * scale * weights.norm * functional.silu(z.view_as(o))).flatten(1)


def _heads(convolved: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of each value head; q and k have length 1, and q the softmax scale."""
    q, k, v = convolved.split([weights.key_width, weights.key_width, weights.value_width], dim=1)
    q, k = (_unit(each.unflatten(1, (weights.num_key_heads, weights.key_dim))) for each in (q, k))
    group = weights.num_value_heads // weights.num_key_heads
    q, k = (each.repeat_interleave(group, dim=1) for each in (q * weights.key_dim**-0.5, k))
    return q, k, v.unflatten(1, (weights.num_value_heads, weights.value_dim))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def advance(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and the state after all tokens, chunk by chunk.

    Args:
        q, k, v: `[num_tokens, heads, dim]`.
        decay: logarithms of the factors of the state `[num_tokens, heads]`, like `beta`.
        state: `[heads, value_dim, key_dim]`.
    """
    outputs = []
    for begin in range(0, q.shape[0], CHUNK_TOKENS):
        part = slice(begin, begin + CHUNK_TOKENS)
        out, state = _chunk(q[part], k[part], v[part], decay[part], beta[part], state)
        outputs.append(out)
    return torch.cat(outputs), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Solve the recurrence `S = e^g S; S += beta (v - S k) k^T; o = S q` of a chunk's tokens together."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))  # [heads, tokens, dim]
    beta, total = beta.t()[..., None], decay.cumsum(0).t()  # [heads, tokens, 1], [heads, tokens]
    since = (total[:, :, None] - total[:, None]).tril().exp().tril()  # decay from a token to a later one
    grown = total.exp()[..., None]
    overlap = (beta * (k @ k.mT) * since).tril(-1)
    unit = torch.eye(q.shape[1], device=q.device).expand_as(overlap)
    wanted = beta * (v - (grown * k) @ state.mT)
    values = torch.linalg.solve_triangular(unit + overlap, wanted, upper=False, unitriangular=True)
    out = (grown * q) @ state.mT + ((q @ k.mT) * since) @ values
    left = (total[:, -1:] - total).exp()[..., None]
    return out.transpose(0, 1), total[:, -1, None, None].exp() * state + values.mT @ (left * k)
