"""Sizes of a gated MLP. Needs no torch."""

from dataclasses import dataclass

from common.base.activation import Activation
from common.models.sizes.stacks import Source, Stacks, stacked


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))` behind a norm."""

    inner: int
    activation: Activation = Activation.SILU

    @property
    def num_rows(self) -> int:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return 3 * self.inner

    @property
    def token_rows(self) -> int:
        """Return the rows that a token is multiplied by: all."""
        return self.num_rows

    def step_rows(self, num_tokens: int) -> float:
        """Return the rows read by a decode step: all."""
        return self.num_rows

    def activation_elements(self, hidden_size: int) -> int:
        """Return the fp32 elements held at once for each token, beside the residual stream."""
        return self.num_rows

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, hidden = f"{prefix}.mlp", source.hidden_size
        rows = [(f"{name}.gate_proj.weight", self.inner), (f"{name}.up_proj.weight", self.inner)]
        return {
            "gate_up": stacked(rows, hidden),
            "down": source.matrix(f"{name}.down_proj.weight", hidden, self.inner),
        }
