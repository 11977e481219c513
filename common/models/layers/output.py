"""The end of a layer's part: a product that is added to the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from common.models.layers.tasks import zeros
from common.ops.base import Norm, Ops, Residual, Weight


@dataclass(frozen=True, slots=True)
class Output:
    """A product, its norm if the family has one there, and the addition to the residual stream."""

    weight: Weight  # [hidden, width]
    norm: Norm | None = None
    scale: Tensor | None = None  # [1], of the stream behind the addition; only behind a norm

    def add(self, ops: Ops, x: Tensor, residual: Residual) -> Residual:
        """Return the stream with the product of `x` added."""
        if self.norm is None:
            return ops.linear_add(x, self.weight, residual)
        return ops.linear_norm_add(x, self.weight, self.norm, residual, self.scale)

    def zeros(self, ops: Ops, num_tokens: int) -> Residual:
        """Return a residual stream of zeros with a product of zeros added."""
        weight = self.weight
        return self.add(
            ops, zeros(weight, num_tokens, weight.num_in), Residual(zeros(weight, num_tokens, weight.num_out))
        )
