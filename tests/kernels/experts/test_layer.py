"""A layer of experts as a GPU computes it: every size class of tokens, against the law."""

import pytest
import torch

from common.base.activation import Activation
from common.base.routing import Route
from common.ops import reference
from common.ops.base import ExpertWeights, Router
from common.ops.cuda_experts import CudaExperts
from tests.kernels.conftest import AssertClose, gpu_at

HIDDEN, INNER, NUM = 48, 24, 6


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
    parts = layer.outputs(x, routing, weights)
    assert_close(parts.float().sum(0).to(dtype), reference.experts(x, routing, weights).to(dtype))


def test_a_lone_row_of_padding_is_zero(device: torch.device, dtype: torch.dtype) -> None:
    weights = ExpertWeights(
        torch.randn(NUM, 2 * INNER, HIDDEN).to(device, dtype),
        torch.randn(NUM, HIDDEN, INNER).to(device, dtype),
        Activation.SILU,
    )
    x, absent = torch.randn(1, HIDDEN).to(device, dtype), torch.zeros(1, dtype=torch.int32, device=device)
    layer = CudaExperts(gpu_at(device), is_reference=False, pdl=False)
    routing = layer.route(x, Router(torch.randn(NUM, HIDDEN).to(device, dtype), Route(2), NUM), absent)
    assert not layer.outputs(x, routing, weights).any()
