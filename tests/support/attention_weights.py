"""What attention has beside projections, drawn at random."""

import torch

from common.kernels.base.attention_operands import AttentionWeights


def attention_weights(
    num_q: int,
    num_kv: int,
    head_dim: int,
    num_positions: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    has_norm: bool = True,
    has_bias: bool = False,
    has_factors: bool = False,
    has_sinks: bool = False,
    norms_values: bool = False,
    shares_kv: bool = False,
    window: int = 0,
    eps: float = 1e-6,
) -> AttentionWeights:
    """Norms and biases of that type, and any angles at all; sinks are now below the scores, now above."""
    angles = torch.rand(num_positions, head_dim // 2) * 6
    norms = [(torch.rand(head_dim) + 0.5).to(device, dtype) if has_norm else None for _ in range(2)]
    return AttentionWeights(
        q_norm=norms[0],
        k_norm=norms[1],
        norm_eps=eps,
        rope=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        num_q_heads=num_q,
        num_kv_heads=num_kv,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        bias=torch.randn((num_q + (1 if shares_kv else 2) * num_kv) * head_dim).to(device, dtype) if has_bias else None,
        norms_values=norms_values,
        shares_kv=shares_kv,
        query_factors=(torch.rand(num_positions) + 0.5).to(device) if has_factors else None,
        sinks=(torch.randn(num_q) * 3).to(device) if has_sinks else None,
    )
