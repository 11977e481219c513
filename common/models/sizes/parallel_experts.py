"""Sizes of a dense gated MLP and experts side by side. Needs no torch."""

from dataclasses import dataclass

from common.models.sizes.experts import Experts
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.stacks import Source, Stacks


@dataclass(frozen=True, slots=True)
class ParallelExperts:
    """A dense gated MLP and experts that see the same residual stream; the normed outputs of both are added up.

    The router sees the stream behind a norm of its own.
    """

    dense: GatedMLP
    experts: Experts

    @property
    def num_rows(self) -> float:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return self.dense.num_rows + self.experts.num_rows

    @property
    def token_rows(self) -> int:
        """Return the rows that a token is multiplied by."""
        return self.dense.num_rows + self.experts.token_rows

    def step_rows(self, num_tokens: int) -> float:
        """Return the rows read by a decode step, on average over choices without preference."""
        return self.dense.num_rows + self.experts.step_rows(num_tokens)

    def read_share(self, num_tokens: int) -> float:
        """Return the share of all experts that a decode step reads, on average over choices without preference."""
        return self.experts.read_share(num_tokens)

    def activation_elements(self, hidden_size: int) -> int:
        """Return the fp32 elements held at once for each token, beside the residual stream."""
        dense, experts = (each.activation_elements(hidden_size) for each in (self.dense, self.experts))
        return dense + experts + 2 * hidden_size

    def stacks(self, source: Source, prefix: str) -> Stacks:
        norms = {
            "router_norm": "router.scale",
            "before_experts": "pre_feedforward_layernorm_2.weight",
            "after_dense": "post_feedforward_layernorm_1.weight",
            "after_experts": "post_feedforward_layernorm_2.weight",
        }
        stacks = {name: source.norm(f"{prefix}.{stored}", source.hidden_size) for name, stored in norms.items()}
        return stacks | self.dense.stacks(source, prefix) | self.experts.stacks(source, prefix)
