"""A dense gated MLP and experts side by side, as a part of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.layers.experts import expert_weights, router
from common.models.layers.mlp import MLPPart
from common.models.layers.tasks import Task, stream
from common.models.layers.tensors import LayerTensors
from common.models.sizes.parallel_experts import ParallelExperts
from common.ops.base import ExpertWeights, Norm, Ops, Residual, Router


@dataclass(frozen=True, slots=True)
class ParallelExpertsPart:
    """A dense MLP, experts and their router, each behind a norm of its own; the sum of the normed outputs is normed."""

    dense: MLPPart  # ends with the norm of the dense output
    router_norm: Norm
    router: Router
    norm: Norm  # before the experts
    weights: ExpertWeights
    after_experts: Norm
    after: Norm
    scale: Tensor | None  # [1], of the stream behind the addition

    def forward(self, x: Residual, ops: Ops, present: Tensor) -> Residual:
        """Return the stream with the result added; padding, where `present` is 0, has no experts."""
        gated = self.dense.first_product(ops, x)
        x = Residual(x.rows)  # the norm has added the parts
        both = self.dense.out.add(ops, gated, Residual(torch.zeros_like(x.rows)))
        _, routing = ops.norm_route(x, self.router_norm, self.router, present)
        both = ops.experts_norm_add(ops.norm(x, self.norm), routing, self.weights, self.after_experts, both)
        return ops.norm_add(both.rows, self.after, x, self.scale)

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with the part's result added."""
        x = stream(self.dense.gate_up, num_tokens)
        return self.forward(x, ops, torch.ones(num_tokens, dtype=torch.int32, device=x.rows.device))

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return the products on zeros."""
        return [lambda: self.zeros(ops, num_tokens)]

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return self.dense.first_product(ops, x)


def parallel_experts_part(parallel: ParallelExperts, tensors: LayerTensors) -> ParallelExpertsPart:
    """Build the part from its sizes and tensors."""
    return ParallelExpertsPart(
        dense=MLPPart(
            norm=tensors.norm("before_mlp"),
            gate_up=tensors.weight("gate_up"),
            out=tensors.output("down", "after_dense"),
            activation=parallel.dense.activation,
        ),
        router_norm=tensors.norm("router_norm"),
        router=router(parallel.experts, tensors),
        norm=tensors.norm("before_experts"),
        weights=expert_weights(parallel.experts, tensors),
        after_experts=tensors.norm("after_experts"),
        after=tensors.norm("after_mlp"),
        scale=tensors.get("scale"),
    )
