"""Products of experts against their law, at odd sizes, with padding, into poisoned outputs."""

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.base.expert_operands import ExpertMatrix, Form, Routing
from common.kernels.experts.grouping import group_pairs
from common.kernels.experts.products import experts_down, experts_gate_up
from common.kernels.experts.tiles import ExpertTiles, expert_tiles
from common.ops import reference
from common.ops.base import ExpertWeights
from tests.kernels.conftest import AssertClose, gpu_at

CASES = [
    (5, 8, 3, Activation.SILU, False),
    (1, 6, 2, Activation.CLAMPED_SWIGLU, True),
    (16, 20, 3, Activation.GELU_TANH, False),
    (70, 5, 2, Activation.SILU, True),
]
"""Tokens, experts, experts of a token, activation, biases."""
TILES = ExpertTiles(16, 16, 32, 64, 2, 4)


def make_routing(num_tokens: int, num_experts: int, per_token: int, device: torch.device) -> Routing:
    """Random choices; every third token is padding."""
    experts = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :per_token].int()
    weights = torch.rand(num_tokens, per_token)
    experts[2::3], weights[2::3] = -1, 0.0
    return Routing(experts.to(device), weights.to(device))


def computed(
    x: Tensor, gate_up: ExpertMatrix, down: ExpertMatrix, routing: Routing, activation: Activation, tiles: ExpertTiles,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    num = gate_up.data.shape[0]
    groups = None if x.shape[0] == 1 else group_pairs(routing.experts, num, tiles.pairs)
    inner = experts_gate_up(x, gate_up, routing, groups, activation.value, tiles)
    parts = experts_down(inner, down, routing, groups, tiles, out_dtype=out_dtype)
    assert parts.dtype == out_dtype
    return parts.float().sum(0).to(x.dtype)


def matrix(num: int, n: int, k: int, device: torch.device, dtype: torch.dtype, *, has_bias: bool) -> ExpertMatrix:
    bias = torch.randn(num, n).to(device, dtype) if has_bias else None
    return ExpertMatrix((torch.randn(num, n, k) * 0.2).to(device, dtype), None, bias)


@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token", "activation", "has_bias"), CASES)
def test_equals_the_law(
    num_tokens: int, num_experts: int, per_token: int, activation: Activation, has_bias: bool,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    hidden, inner = 72, 40
    x, routing = (
        torch.randn(num_tokens, hidden).to(device, dtype),
        make_routing(num_tokens, num_experts, per_token, device),
    )
    gate_up = matrix(num_experts, 2 * inner, hidden, device, dtype, has_bias=has_bias)
    down = matrix(num_experts, hidden, inner, device, dtype, has_bias=has_bias)
    weights = ExpertWeights(gate_up.data, down.data, activation, gate_up.bias, down.bias)
    law = reference.experts(x, routing, weights).to(dtype)
    assert_close(computed(x, gate_up, down, routing, activation, TILES), law)
    tiles = expert_tiles(num_tokens, per_token, num_experts, x.element_size(), gpu_at(device))
    assert_close(computed(x, gate_up, down, routing, activation, tiles, dtype), law)


@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token"), [(5, 3, 2), (1, 3, 2), (200, 3, 2)])
def test_matrices_may_be_mxfp4(
    num_tokens: int, num_experts: int, per_token: int,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    hidden, inner, activation = 160, 96, Activation.CLAMPED_SWIGLU
    x, routing = (
        torch.randn(num_tokens, hidden).to(device, dtype),
        make_routing(num_tokens, num_experts, per_token, device),
    )

    def packed(n: int, k: int) -> ExpertMatrix:
        data = torch.randint(256, (num_experts, n, k // 2), dtype=torch.uint8)
        scales = torch.randint(122, 126, (num_experts, n, k // 32), dtype=torch.uint8)
        return ExpertMatrix(data.to(device), scales.to(device), torch.randn(num_experts, n).to(device, dtype))

    gate_up, down = packed(2 * inner, hidden), packed(hidden, inner)
    biases, scales = (gate_up.bias, down.bias), (gate_up.scales, down.scales)
    weights = ExpertWeights(gate_up.data, down.data, activation, *biases, *scales)
    law = reference.experts(x, routing, weights).to(dtype)
    assert_close(computed(x, gate_up, down, routing, activation, TILES), law)
    tiles = expert_tiles(num_tokens, per_token, num_experts, x.element_size(), gpu_at(device), Form.MXFP4)
    assert_close(computed(x, gate_up, down, routing, activation, tiles), law)
