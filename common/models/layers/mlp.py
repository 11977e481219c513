"""A gated MLP as a part of a layer."""

from dataclasses import dataclass

from torch import Tensor

from common.models.layers.output import Output
from common.models.layers.tasks import Task, stream
from common.models.layers.tensors import LayerTensors
from common.models.sizes.mlp import GatedMLP
from common.ops.base import Activation, Norm, Ops, Residual, Weight


@dataclass(frozen=True, slots=True)
class MLPPart:
    """Norm, gate and up, activation, and down."""

    norm: Norm
    gate_up: Weight  # [2 * inner, hidden]
    out: Output  # [hidden, inner]
    activation: Activation

    def forward(self, x: Residual, ops: Ops, present: Tensor) -> Residual:
        """Return the stream with the result added, for padding as well."""
        return self.out.add(ops, self.first_product(ops, x), Residual(x.rows))  # the norm has added the parts

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with the part's result added."""
        return self.out.zeros(ops, num_tokens)

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return the products on zeros."""
        return [lambda: self.first_product(ops, stream(self.gate_up, num_tokens))]

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return ops.norm_gate_up(x, self.norm, self.gate_up, self.activation)


def mlp_part(mlp: GatedMLP, tensors: LayerTensors) -> MLPPart:
    """Build the part from its sizes and tensors."""
    return MLPPart(
        norm=tensors.norm("before_mlp"),
        gate_up=tensors.weight("gate_up"),
        out=tensors.output("down", "after_mlp", "scale"),
        activation=mlp.activation,
    )
