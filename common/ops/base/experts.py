"""Router and matrices of a layer of experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.base.activation import Activation
from common.base.routing import Route
from common.kernels.base.expert_operands import ExpertMatrix
from common.kernels.base.expert_operands import Routing as Routing


@dataclass(frozen=True, slots=True)
class Router:
    """A matrix that scores experts, and the rules of the choice.

    Beside the experts chosen, each token has the last `num_shared` experts of all, with the weight 1. If the matrix has
    a row more than experts to choose from, the weight is the sigmoid of that row's logit.
    """

    weight: Tensor  # [num_experts, hidden], or with a gate of the shared experts [num_experts + 1, hidden]
    route: Route
    num_experts: int  # to choose from
    num_shared: int = 0
    bias: Tensor | None = None  # [num_experts] fp32, added to the logits
    selection_bias: Tensor | None = None  # [num_experts] fp32, added to the scores for the choice, not for the weights
    expert_scale: Tensor | None = None  # [num_experts] fp32, factors of the weights

    @property
    def has_shared_gate(self) -> bool:
        return self.weight.shape[0] > self.num_experts

    @property
    def num_slots(self) -> int:
        """Return the experts of a token, shared experts included."""
        return self.route.per_token + self.num_shared


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of all experts; the shared experts are the last.

    With scales of bytes, matrices are in MXFP4: uint8 of half the width, and a scale for each 32 values along a row.
    With scales in a float, matrices of uint8 are codes of 4 bits, packed by `pack_quarters`. Their scales and offsets
    are those of groups, as a `Weight` has them. Other matrices are codes of 8 bits. Activations stay as they are.
    """

    gate_up: Tensor  # [num, 2 * inner, hidden], gate first
    down: Tensor  # [num, hidden, inner]
    activation: Activation
    gate_up_bias: Tensor | None = None  # [num, 2 * inner]
    down_bias: Tensor | None = None  # [num, hidden]
    gate_up_scales: Tensor | None = None  # [num, 2 * inner, hidden / 32] uint8; of codes, as `ExpertMatrix` has them
    down_scales: Tensor | None = None  # [num, hidden, inner / 32] uint8; of codes, as `ExpertMatrix` has them
    gate_up_offsets: Tensor | None = None  # as the scales, of codes of 4 bits
    down_offsets: Tensor | None = None  # alike

    @property
    def num(self) -> int:
        return self.gate_up.shape[0]

    @property
    def inner(self) -> int:
        return self.gate_up.shape[1] // 2

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    @property
    def gate_up_matrix(self) -> ExpertMatrix:
        return _matrix(self.gate_up, self.gate_up_scales, self.gate_up_bias, self.gate_up_offsets)

    @property
    def down_matrix(self) -> ExpertMatrix:
        return _matrix(self.down, self.down_scales, self.down_bias, self.down_offsets)


def _matrix(data: Tensor, scales: Tensor | None, bias: Tensor | None, offsets: Tensor | None) -> ExpertMatrix:
    is_int4 = scales is not None and data.dtype == torch.uint8 and scales.is_floating_point()
    return ExpertMatrix(data, scales, bias, offsets, is_int4)
