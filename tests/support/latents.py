"""Weights of latent attention, drawn at random."""

from typing import NamedTuple

import torch

from common.kernels.base.latent_operands import LatentWeights


class Dims(NamedTuple):
    """Sizes of latent attention."""

    num_heads: int = 4
    rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 16


def latent_weights(
    dims: Dims, num_positions: int, device: torch.device, dtype: torch.dtype, *, has_factors: bool = False
) -> LatentWeights:
    """Return weights of that type, and any angles at all."""
    angles = torch.rand(num_positions, dims.rope // 2) * 6
    expand = torch.randn(dims.num_heads, dims.nope + dims.value, dims.rank) * dims.rank**-0.5
    return LatentWeights(
        norm=(torch.rand(dims.rank) + 0.5).to(device, dtype),
        norm_eps=1e-6,
        expand=expand.to(device, dtype),
        rope=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        nope_dim=dims.nope,
        scale=(dims.nope + dims.rope) ** -0.5,
        query_factors=(torch.rand(num_positions) + 0.5).to(device) if has_factors else None,
    )
