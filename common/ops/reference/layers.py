"""Law of what a layer computes beside products: norms, gates, rotation and attention.

Norms, rotations and softmax are computed in fp32 and rounded once to the input's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.base.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from common.kernels.base.attention_operands import AttentionWeights
from common.ops.base import ForwardBatch

E4M3_MAX = 448.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply the root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return `(residual + rms_norm(x)) * scale`; `scale` is `[1]` fp32, or None for 1."""
    added = residual.float() + rms_norm(x.float(), weight, eps)
    return (added if scale is None else added * scale).to(residual.dtype)


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up` of `[num_tokens, 2 * inner]`, gate first; a clamped SwiGLU as defined there."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return ((up + 1.0) * gate * (SWIGLU_ALPHA * gate).sigmoid()).to(gate_up.dtype)
    opened = functional.silu(gate) if activation is Activation.SILU else functional.gelu(gate, approximate="tanh")
    return (opened * up).to(gate_up.dtype)


def rotate(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embedding (Su et al., 2021), halves convention, to fp32 `[num_tokens, heads, head_dim]`."""
    cos, sin = rope[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, head_dim / 2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def qk_norm_rope_kv(
    qkv: Tensor,  # [num_tokens, (q_heads + 2 * kv_heads) * head_dim], or without V where K and V are shared
    weights: AttentionWeights,
    positions: Tensor,  # [num_tokens] int32
    slot_mapping: Tensor,  # [num_tokens] int64
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim], strided
    v_cache: Tensor,
) -> Tensor:
    """Write K and V of each token to its slot (none for slot -1); return q, normed and rotated."""
    num_q, num_kv = weights.num_q_heads, weights.num_kv_heads
    biased = qkv.float() if weights.bias is None else qkv.float() + weights.bias.float()
    heads = biased.view(qkv.shape[0], -1, weights.head_dim)
    q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, -num_kv:]
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, weights.q_norm, weights.norm_eps)
        k = rms_norm(k, weights.k_norm, weights.norm_eps)
    if weights.norms_values:
        v = rms_norm(v, torch.ones_like(v[0, 0]), weights.norm_eps)
    q, k = rotate(q, weights.rope, positions), rotate(k, weights.rope, positions)
    if weights.query_factors is not None:
        q = q * weights.query_factors[positions.long()].view(-1, 1, 1)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    k_cache[slots // block_size, slots % block_size] = stored(k[kept], k_cache.dtype, weights.k_scale)
    v_cache[slots // block_size, slots % block_size] = stored(v[kept], v_cache.dtype, weights.v_scale)
    return q.to(qkv.dtype)


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return fp32 keys or values as a cache of `dtype` holds them; the scale is of an e4m3 cache.

    Numbers beyond e4m3's largest become the largest, NaN stays NaN.
    """
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return (x * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(dtype)


def cache_attention(
    q: Tensor, weights: AttentionWeights, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, batch: ForwardBatch
) -> Tensor:
    """Do `paged_attention` with the weights' scales, window and sinks."""
    k_scale, v_scale = weights.cache_scales(k_cache.dtype)
    seen = (weights.scale * k_scale, weights.window, weights.sinks)
    return (paged_attention(q.float(), k_cache, v_cache, block_table, batch, *seen) * v_scale).to(q.dtype)


def paged_attention(
    q: Tensor,  # [num_tokens, q_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim], strided
    v_cache: Tensor,
    block_table: Tensor,  # [num_seqs, max_blocks]
    batch: ForwardBatch,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from each sequence's last tokens over its blocks: `[num_tokens, q_heads, head_dim]`.

    Args:
        window: tokens seen by a token, itself included; 0: all. Blocks out of sight are not read.
        sinks: `[q_heads]` fp32, a score of no token for each head, in the sum of weights only.
    """
    out = torch.zeros_like(q)
    bounds = batch.cu_seqlens.tolist()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if seq_len == 0 or begin == end:
            continue
        block_size, first_query = k_cache.shape[1], seq_len - (end - begin)
        first_block = max(0, first_query + 1 - window) // block_size if window else 0
        blocks = block_table[i, first_block : -(-seq_len // block_size)].long()
        num_keys = seq_len - first_block * block_size
        k = k_cache[blocks].flatten(0, 1)[:num_keys].float()  # [num_keys, kv_heads, head_dim]
        v = v_cache[blocks].flatten(0, 1)[:num_keys].float()
        out[begin:end] = attend(q[begin:end].float(), k, v, scale, window, sinks).to(q.dtype)
    return out


def attend(
    q: Tensor,  # [queries, q_heads, dim] fp32
    k: Tensor,  # [keys, kv_heads, dim] fp32
    v: Tensor,  # [keys, kv_heads, value_dim] fp32
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal softmax attention in fp32; the last query sees the end of k: `[queries, q_heads, value_dim]`.

    Keys out of sight have no weight, and may hold anything.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    offset = k.shape[0] - q.shape[0]
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(offset + 1)
    if window:
        hidden |= torch.ones_like(hidden).tril(offset - window)
        v = v.masked_fill(hidden.all(0).view(-1, 1, 1), 0.0)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, q.shape[0], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)
