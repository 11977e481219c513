"""A layer of experts as a GPU computes it: every size class of tokens, against the law."""

import pytest
import torch

from common.base.activation import Activation
from common.base.routing import Route
from common.kernels.experts import lone_token
from common.kernels.products.join_parts import join_parts
from common.ops import reference
from common.ops.base import ExpertWeights, Residual, Router, Routing
from common.ops.cuda_experts import CudaExperts
from tests.kernels.conftest import AssertClose, gpu_at

HIDDEN, INNER, NUM = 48, 24, 6


def whole(x: Residual) -> torch.Tensor:
    """As the next norm adds it up."""
    return x.rows if x.parts is None else join_parts(x.parts, x.rows)


@pytest.mark.parametrize("num_tokens", [1, 9, 40, 130, pytest.param(1030, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_reference", [False, True])
def test_equals_the_law(
    num_tokens: int, is_reference: bool, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).div(shape[-1] ** 0.5).to(device, dtype)

    x, router = random(num_tokens, HIDDEN), Router(random(NUM + 1, HIDDEN) * 20, Route(2), NUM, num_shared=1)
    weights = ExpertWeights(random(NUM + 1, 2 * INNER, HIDDEN), random(NUM + 1, HIDDEN, INNER), Activation.SILU)
    present = torch.ones(num_tokens, dtype=torch.int32, device=device)
    present[2::3] = 0
    layer = CudaExperts(gpu_at(device), is_reference=is_reference, pdl=False)
    routing = layer.route(x, router, present)
    assert routing.experts.shape == (num_tokens, 3) and (routing.experts[2::3] == -1).all()
    rows = random(num_tokens, HIDDEN)
    law = (rows + reference.experts(x, routing, weights)).to(dtype)
    assert_close(whole(layer.add(x, routing, weights, Residual(rows))), law)


@pytest.mark.parametrize("activation", Activation)
def test_a_lone_token_s_experts_may_have_biases(
    activation: Activation,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of more tiles than are on the way at once."""
    monkeypatch.setattr(lone_token, "GATE_STAGES", 1)
    monkeypatch.setattr(lone_token, "DOWN_STAGES", 2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).div(shape[-1] ** 0.5).to(device, dtype)

    hidden, inner = 301, 21
    weights = ExpertWeights(
        random(NUM, 2 * inner, hidden),
        random(NUM, hidden, inner),
        activation,
        random(NUM, 2 * inner),
        random(NUM, hidden),
    )
    x, rows = random(1, hidden), random(1, hidden)
    routing = Routing(torch.tensor([[4, 0, 3]]).int().to(device), torch.tensor([[0.5, 0.3, 0.1]]).to(device))
    law = (rows + reference.experts(x, routing, weights)).to(dtype)
    layer = CudaExperts(gpu_at(device), is_reference=False, pdl=False)
    assert_close(whole(layer.add(x, routing, weights, Residual(rows))), law)


@pytest.mark.parametrize("num_tokens", [1, 4, 30, 130, pytest.param(1030, marks=pytest.mark.gpu)])
def test_matrices_may_be_mxfp4(
    num_tokens: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    def some_bytes(*shape: int, least: int = 0, end: int = 256) -> torch.Tensor:
        return torch.randint(least, end, shape, dtype=torch.uint8).to(device)

    width = 160
    weights = ExpertWeights(
        some_bytes(NUM, 2 * width, width // 2),
        some_bytes(NUM, width, width // 2),
        Activation.SILU,
        gate_up_scales=some_bytes(NUM, 2 * width, 5, least=120, end=123),
        down_scales=some_bytes(NUM, width, 5, least=120, end=123),
    )
    x, rows = torch.randn(2, num_tokens, width).to(device, dtype)
    router = Router(torch.randn(NUM, width).to(device, dtype), Route(2), NUM)
    present = torch.ones(num_tokens, dtype=torch.int32, device=device)
    layer = CudaExperts(gpu_at(device), is_reference=False, pdl=False)
    routing = layer.route(x, router, present)
    law = (rows + reference.experts(x, routing, weights)).to(dtype)
    assert_close(whole(layer.add(x, routing, weights, Residual(rows))), law)


def test_a_lone_row_of_padding_stays(device: torch.device, dtype: torch.dtype) -> None:
    weights = ExpertWeights(
        torch.randn(NUM, 2 * INNER, HIDDEN).to(device, dtype),
        torch.randn(NUM, HIDDEN, INNER).to(device, dtype),
        Activation.SILU,
    )
    x, absent = torch.randn(1, HIDDEN).to(device, dtype), torch.zeros(1, dtype=torch.int32, device=device)
    layer = CudaExperts(gpu_at(device), is_reference=False, pdl=False)
    routing = layer.route(x, Router(torch.randn(NUM, HIDDEN).to(device, dtype), Route(2), NUM), absent)
    added = layer.add(x, routing, weights, Residual(x.clone()))
    assert torch.equal(whole(added), x)
