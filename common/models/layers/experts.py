"""Experts as a part of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.layers.tasks import Task
from common.models.layers.tensors import LayerTensors
from common.models.sizes.experts import Experts
from common.ops.base import ExpertWeights, Norm, Ops, Residual, Router, Routing


@dataclass(frozen=True, slots=True)
class ExpertsPart:
    """Norm, the choice of experts, and the weighted sum of what the chosen experts make of a token."""

    norm: Norm
    router: Router
    weights: ExpertWeights

    def forward(self, x: Residual, ops: Ops, present: Tensor) -> Residual:
        """Return the stream with the sum added; padding, where `present` is 0, has no experts."""
        normed, routing = ops.norm_route(x, self.norm, self.router, present)
        return ops.experts_add(normed, routing, self.weights, Residual(x.rows))  # the norm has added the parts

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with the part's result added."""
        rows = self._zeros(num_tokens)
        _, routing = self.first_product(ops, Residual(rows))
        return ops.experts_add(rows, routing, self.weights, Residual(torch.zeros_like(rows)))

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return the products on zeros."""
        return [lambda: self.zeros(ops, num_tokens)]

    def first_product(self, ops: Ops, x: Residual) -> tuple[Tensor, Routing]:
        """Return the normed stream and the choice of experts, without padding."""
        present = torch.ones(x.rows.shape[0], dtype=torch.int32, device=x.rows.device)
        return ops.norm_route(x, self.norm, self.router, present)

    def _zeros(self, num_tokens: int) -> Tensor:
        weight = self.router.weight
        return torch.zeros((num_tokens, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def experts_part(experts: Experts, tensors: LayerTensors) -> ExpertsPart:
    """Build the part from its sizes and tensors."""
    return ExpertsPart(tensors.norm("before_mlp"), router(experts, tensors), expert_weights(experts, tensors))


def router(experts: Experts, tensors: LayerTensors) -> Router:
    """Return the router of a layer's experts."""
    return Router(
        weight=tensors["router"],
        route=experts.route,
        num_experts=experts.num,
        num_shared=experts.num_shared,
        bias=tensors.get("router_bias"),
        selection_bias=tensors.get("selection_bias"),
        expert_scale=tensors.get("expert_scale"),
    )


def expert_weights(experts: Experts, tensors: LayerTensors) -> ExpertWeights:
    """Return the matrices of a layer's experts."""

    def of_each(name: str) -> Tensor | None:
        rows = tensors.get(f"experts_{name}")
        return None if rows is None else rows.unflatten(0, (experts.num_all, -1))

    gate_up, down = of_each("gate_up"), of_each("down")
    assert gate_up is not None and down is not None
    return ExpertWeights(
        gate_up=gate_up,
        down=down,
        activation=experts.activation,
        gate_up_bias=of_each("gate_up_bias"),
        down_bias=of_each("down_bias"),
        gate_up_scales=of_each("gate_up_scales"),
        down_scales=of_each("down_scales"),
        gate_up_offsets=of_each("gate_up_offsets"),
        down_offsets=of_each("down_offsets"),
    )
