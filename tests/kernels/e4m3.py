"""Caches of e4m3 numbers as kernels take them, and what is attended to in them, computed on the CPU."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.kernels.base.attention_operands import AttentionWeights
from common.ops import reference
from common.ops.base import ForwardBatch

E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.75, 2.5
"""Scales of a cache, no powers of two."""


def narrow(pool: Tensor) -> Tensor:
    """The numbers of a pool in e4m3; NaN stays."""
    return pool.float().cpu().clamp(-448, 448).to(E4M3).to(pool.device)


def attended(
    q: Tensor, pool: Tensor, batch: ForwardBatch, scale: float, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """What queries attend to in layer 1 of a pool of e4m3 numbers, with the scales: by the reference, in fp32."""
    k, v = pool.cpu().view(E4M3).float()[:, 1].unbind(1)
    sinks = None if sinks is None else sinks.cpu()
    args = (q.float().cpu(), k * K_SCALE, v * V_SCALE, batch.block_tables[0].cpu(), on_cpu(batch))
    return reference.paged_attention(*args, scale, window, sinks).to(q)


def on_cpu(batch: ForwardBatch) -> ForwardBatch:
    """The batch, copied."""
    return replace(
        batch,
        positions=batch.positions.cpu(),
        slots=tuple(each.cpu() for each in batch.slots),
        block_tables=tuple(each.cpu() for each in batch.block_tables),
        seq_lens=batch.seq_lens.cpu(),
        cu_seqlens=batch.cu_seqlens.cpu(),
    )


def weights_on_cpu(weights: AttentionWeights) -> AttentionWeights:
    """The weights, copied."""
    names = ("q_norm", "k_norm", "rope", "bias", "query_factors", "sinks")
    tensors = {name: getattr(weights, name) for name in names}
    copies: dict[str, Any] = {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}
    return replace(weights, **copies)


def differing(ours: Tensor, theirs: Tensor) -> float:
    """The share of numbers that differ; fails if any does by more than one code.

    Sums in fp32 have no order that all have, so some numbers are rounded the other way.
    """
    codes = [each.cpu().view(torch.uint8).int() for each in (ours, theirs)]
    places = [torch.where(code < 128, code, 128 - code) for code in codes]  # in the order of numbers
    steps = (places[0] - places[1]).abs()
    assert steps.max() <= 1
    return float((steps > 0).float().mean())
