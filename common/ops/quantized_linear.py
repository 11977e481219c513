"""Products with quantized matrices on a GPU, by the reference."""

from torch import Tensor

from common.ops import reference
from common.ops.base import Activation, Norm, Residual, Weight
from common.ops.linear import FusedLinear


class QuantizedLinear:
    """Runs products of quantized matrices.

    Args:
        linear: what norms, and adds parts to the residual stream.
    """

    def __init__(self, linear: FusedLinear) -> None:
        self._linear = linear

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        """Return `rms_norm(x) @ weight.T`: `[num_tokens, n]`."""
        return reference.linear(self._linear.normed(x, norm), weight)

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        """Return `residual + x @ weight.T`, in the memory of `residual`."""
        return Residual(residual.rows.add_(reference.linear(x, weight)))

    def norm_gate_up(self, x: Residual, norm: Norm, gate_up: Weight, activation: Activation) -> Tensor:
        """Return `activation(g) * u` of `rms_norm(x) @ gate_up.T`: `[num_tokens, inner]`."""
        return self._linear.gate(self.norm_linear(x, norm, gate_up), activation)

    def parts(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the product alone, in parts to be added up: `[splits, num_tokens, n]`."""
        return reference.linear(x, weight)[None]
