"""The gated delta rule as a part of a layer."""

from dataclasses import dataclass

from torch import Tensor

from common.models.layers.output import Output
from common.models.layers.tasks import Task, stream, zeros
from common.models.layers.tensors import LayerTensors
from common.models.sizes.delta_rule import DeltaRule
from common.ops.base import DeltaWeights, ForwardBatch, Norm, Ops, Residual, Weight


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """Norm, a product of all inputs, the gated delta rule, and the product behind it.

    `layer_id` is the layer's place in the states of its group.
    """

    norm: Norm
    inputs: Weight  # [channels + value_width + 2 * value_heads, hidden]
    delta: DeltaWeights
    out: Output  # [hidden, value_width]
    layer_id: int

    def forward(self, x: Residual, batch: ForwardBatch, ops: Ops, *, of_last: bool) -> Residual:
        """Advance the states by all tokens; return the stream of all, or with `of_last` of each prompt's last token."""
        mixed = ops.delta_rule(self.first_product(ops, x), self.delta, self.layer_id, batch)
        x = Residual(x.rows)  # the norm has added the parts
        if of_last:
            mixed, x = mixed[batch.last_tokens], Residual(x.rows[batch.last_tokens])
        return self.out.add(ops, mixed, x)

    def attend(self, ops: Ops, batch: ForwardBatch, *, of_last: bool) -> None:
        """Run over zeros, to warm up."""
        batch = ops.begin(batch)
        inputs = zeros(self.inputs, batch.token_ids.shape[0], self.inputs.num_out)
        ops.delta_rule(inputs, self.delta, self.layer_id, batch)

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with the part's result added."""
        return self.out.zeros(ops, num_tokens)

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return the products on zeros."""
        return [lambda: self.first_product(ops, stream(self.inputs, num_tokens))]

    def first_product(self, ops: Ops, x: Residual) -> Tensor:
        """Return the first product of the part."""
        return ops.norm_linear(x, self.norm, self.inputs)


def delta_part(delta: DeltaRule, tensors: LayerTensors, group: int, layer_id: int) -> DeltaPart:
    """Build the part from its sizes and tensors."""
    weights = DeltaWeights(
        conv=tensors["conv"],
        decay=tensors["decay"],
        dt_bias=tensors["dt_bias"],
        norm=tensors["delta_norm"],
        norm_eps=tensors.norm_eps,
        num_key_heads=delta.num_key_heads,
        num_value_heads=delta.num_value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        group=group,
    )
    return DeltaPart(
        norm=tensors.norm("before_mixer"),
        inputs=tensors.weight("delta_in"),
        delta=weights,
        out=tensors.output("delta_out", "after_mixer"),
        layer_id=layer_id,
    )
