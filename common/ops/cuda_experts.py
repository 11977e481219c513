"""Layers of experts on a GPU: choice, grouping of pairs by expert, and products."""

from dataclasses import asdict
from functools import cache

import torch
from torch import Tensor

from common.base.routing import Route
from common.kernels.base.codes import readable
from common.kernels.base.expert_operands import PACKED, Choice, ExpertMatrix, Form, Routing
from common.kernels.base.gpu import Gpu
from common.kernels.experts.choice import choose_experts
from common.kernels.experts.grouping import group_pairs
from common.kernels.experts.lone_codes import lone_experts_in_codes
from common.kernels.experts.lone_token import lone_experts
from common.kernels.experts.products import experts_down, experts_gate_up
from common.kernels.experts.router_logits import FUSED_TOKENS, norm_logits, router_logits
from common.kernels.experts.tiles import MANY_TOKENS, expert_tiles
from common.ops import reference
from common.ops.base import ExpertWeights, Norm, Residual, Router


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
        return self._choose(router_logits(x, router.weight, pdl=self._pdl), router, present)

    def norm_route(self, x: Residual, norm: Norm, router: Router, present: Tensor) -> tuple[Tensor, Routing] | None:
        """Return the normed rows and their experts; None where a norm has to come before."""
        if self._is_reference or x.parts is not None or x.rows.shape[0] > FUSED_TOKENS or not x.rows.is_contiguous():
            return None
        normed, logits = norm_logits(x.rows, norm.weight, norm.eps, router.weight, pdl=self._pdl)
        return normed, self._choose(logits, router, present)

    def _choose(self, logits: Tensor, router: Router, present: Tensor) -> Routing:
        return choose_experts(
            logits,
            _choice(router.route),
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
        gate_up, down, activation = *self._matrices(weights), weights.activation.value
        if x.shape[0] == 1 and gate_up.form not in PACKED:
            lone = lone_experts_in_codes if gate_up.form is Form.BYTES else lone_experts
            return Residual(lone(x, routing, gate_up, down, activation, residual.rows, pdl=self._pdl))
        return Residual(residual.rows, self._outputs(x, routing, gate_up, down, activation))

    def _matrices(self, weights: ExpertWeights) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Return the matrices as kernels read them."""
        gate_up, down = (
            matrix._replace(data=readable(matrix.data, has_e4m3=self._gpu.has_e4m3))
            for matrix in (weights.gate_up_matrix, weights.down_matrix)
        )
        return gate_up, down

    def _outputs(
        self, x: Tensor, routing: Routing, gate_up: ExpertMatrix, down: ExpertMatrix, activation: str
    ) -> Tensor:
        """Return the weighted outputs: `[num_slots, num_tokens, hidden]`."""
        (num_tokens, num_slots), num = routing.experts.shape, gate_up.data.shape[0]
        tiles = expert_tiles(num_tokens, num_slots, num, x.element_size(), self._gpu, gate_up.form)
        groups = None if num_tokens == 1 else group_pairs(routing.experts, num, tiles.pairs, pdl=self._pdl)
        inner = experts_gate_up(x, gate_up, routing, groups, activation, tiles, pdl=self._pdl)
        dtype = torch.float32 if num_tokens <= MANY_TOKENS else x.dtype
        return experts_down(inner, down, routing, groups, tiles, out_dtype=dtype, pdl=self._pdl)


@cache
def _choice(route: Route) -> Choice:
    return Choice(**asdict(route))
