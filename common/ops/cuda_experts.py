"""Layers of experts on a GPU: choice, grouping of pairs by expert, and products."""

from dataclasses import asdict

import torch
from torch import Tensor

from common.kernels.base.expert_operands import Choice, Routing
from common.kernels.base.gpu import Gpu
from common.kernels.experts.grouping import group_pairs
from common.kernels.experts.lone_token import lone_experts
from common.kernels.experts.products import experts_down, experts_gate_up
from common.kernels.experts.routing import route
from common.kernels.experts.tiles import MANY_TOKENS, expert_tiles
from common.ops import reference
from common.ops.base import ExpertWeights, Residual, Router


class CudaExperts:
    """Operations of a layer of experts; all can be captured.

    Args:
        is_reference: compute by the reference, which cannot be captured.
        pdl: launch kernels before their predecessors have finished.
    """

    def __init__(self, gpu: Gpu, *, is_reference: bool, pdl: bool) -> None:
        self._gpu = gpu
        self._is_reference = is_reference
        self._pdl = pdl

    def route(self, x: Tensor, router: Router, present: Tensor) -> Routing:
        """Return the experts of each token of `x [num_tokens, hidden]`; none for padding."""
        if self._is_reference:
            return reference.route(x, router, present)
        return route(
            x,
            router.weight,
            Choice(**asdict(router.route)),
            present,
            num_experts=router.num_experts,
            num_shared=router.num_shared,
            bias=router.bias,
            selection_bias=router.selection_bias,
            expert_scale=router.expert_scale,
            pdl=self._pdl,
        )

    def add(self, x: Tensor, routing: Routing, weights: ExpertWeights, residual: Residual) -> Residual:
        """Return `residual` with the weighted outputs of each token's experts; none for padding.

        The outputs of several tokens are parts, to be added by the next norm. Parts are fp32 for a few tokens, where
        they take no time, and else of the dtype of `x`.
        """
        if self._is_reference:
            return Residual((residual.rows + reference.experts(x, routing, weights)).to(x.dtype))
        is_packed, (num_tokens, num_slots) = weights.gate_up_scales is not None, routing.experts.shape
        gate_up, down, activation = weights.gate_up_matrix, weights.down_matrix, weights.activation.value
        if num_tokens == 1 and not is_packed:
            return Residual(lone_experts(x, routing, gate_up, down, activation, residual.rows, pdl=self._pdl))
        tiles = expert_tiles(num_tokens, num_slots, weights.num, x.element_size(), self._gpu, is_packed=is_packed)
        groups = None if num_tokens == 1 else group_pairs(routing.experts, weights.num, tiles.pairs, pdl=self._pdl)
        inner = experts_gate_up(x, gate_up, routing, groups, activation, tiles, pdl=self._pdl)
        dtype = torch.float32 if num_tokens <= MANY_TOKENS else x.dtype
        parts = experts_down(inner, down, routing, groups, tiles, out_dtype=dtype, pdl=self._pdl)
        return Residual(residual.rows, parts)
