"""Law of latent attention (DeepSeek-V2, 2024): a vector a token, from which keys and values of all heads follow.

The cache holds a normed latent and a rotated key that all heads share. Attention has two forms with equal results:
expanded, over keys and values of each head, and absorbed, over the latents themselves. Computed in fp32, rounded once.
"""

import torch
from torch import Tensor

from common.kernels.base.latent_operands import LatentWeights
from common.ops.base import ForwardBatch
from common.ops.reference.layers import attend, rms_norm, rotate


def write_latents(
    kv: Tensor,  # [num_tokens, rank + rope_dim]: the latent, then the shared key
    weights: LatentWeights,
    positions: Tensor,  # [num_tokens] int32
    slots: Tensor,  # [num_tokens] int64
    cache: Tensor,  # [num_blocks, block_size, rank + rope_dim], strided
) -> None:
    """Norm the latent, rotate the key, and write both to the token's slot (none for slot -1)."""
    latent, key = kv.float().split((weights.rank, weights.rope_dim), dim=-1)
    latent = rms_norm(latent, weights.norm, weights.norm_eps)
    key = rotate(key.unsqueeze(1), weights.rope, positions).squeeze(1)
    kept = slots >= 0
    places, block_size = slots[kept], cache.shape[1]
    cache[places // block_size, places % block_size] = torch.cat((latent, key), dim=-1)[kept].to(cache.dtype)


def rotated_queries(q: Tensor, weights: LatentWeights, positions: Tensor) -> Tensor:
    """Rotate the last dimensions of each head of `q [num_tokens, num_heads * query_dim]`, then apply the factors.

    Returns `[num_tokens, num_heads, query_dim]`.
    """
    heads = q.float().unflatten(-1, (weights.num_heads, weights.query_dim))
    still, turned = heads.split((weights.nope_dim, weights.rope_dim), dim=-1)
    heads = torch.cat((still, rotate(turned, weights.rope, positions)), dim=-1)
    if weights.query_factors is not None:
        heads = heads * weights.query_factors[positions.long()].view(-1, 1, 1)
    return heads.to(q.dtype)


def latent_attention(
    q: Tensor,  # [num_tokens, num_heads, query_dim], rotated
    cache: Tensor,  # [num_blocks, block_size, rank + rope_dim], strided
    block_table: Tensor,  # [num_seqs, max_blocks]
    batch: ForwardBatch,
    weights: LatentWeights,
    *,
    is_absorbed: bool,
) -> Tensor:
    """Attend causally from each sequence's last tokens over its blocks: `[num_tokens, num_heads, value_dim]`."""
    out = q.new_zeros((*q.shape[:2], weights.value_dim))
    bounds = batch.cu_seqlens.tolist()
    form = _absorbed if is_absorbed else _expanded
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if seq_len == 0 or begin == end:
            continue
        blocks = block_table[i, : -(-seq_len // cache.shape[1])].long()
        entries = cache[blocks].flatten(0, 1)[:seq_len].float()  # [seq_len, rank + rope_dim]
        out[begin:end] = form(q[begin:end].float(), entries, weights).to(q.dtype)
    return out


def _expanded(q: Tensor, entries: Tensor, weights: LatentWeights) -> Tensor:
    """Attend over keys and values of each head."""
    latents, shared = entries.split((weights.rank, weights.rope_dim), dim=-1)
    keys, values = expanded(latents, weights)
    keys = torch.cat((keys, shared.unsqueeze(1).expand(-1, weights.num_heads, -1)), dim=-1)
    return attend(q, keys, values, weights.scale)


def expanded(latents: Tensor, weights: LatentWeights) -> tuple[Tensor, Tensor]:
    """Return keys `[num_keys, num_heads, nope_dim]` and values `[num_keys, num_heads, value_dim]` of latents, fp32."""
    expand = weights.expand.float()
    both = torch.einsum("kr,hdr->khd", latents, expand)
    return both[..., : weights.nope_dim], both[..., weights.nope_dim :]


def _absorbed(q: Tensor, entries: Tensor, weights: LatentWeights) -> Tensor:
    """Attend over latents as keys and values of a single head."""
    latents = entries[:, : weights.rank]
    q = torch.cat((absorbed_queries(q, weights), q[..., weights.nope_dim :]), dim=-1)
    summed = attend(q, entries.unsqueeze(1), latents.unsqueeze(1), weights.scale)
    return torch.einsum("qhr,hdr->qhd", summed, weights.values.float())


def absorbed_queries(q: Tensor, weights: LatentWeights) -> Tensor:
    """Return queries whose products with latents are those of `q [.., query_dim]` with keys: `[.., rank]` fp32."""
    return torch.einsum("qhd,hdr->qhr", q[..., : weights.nope_dim].float(), weights.keys.float())
