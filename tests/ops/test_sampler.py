"""The sampler by reference and by kernel."""

import pytest
import torch

from common.ops import reference
from common.ops.base import SamplingTensors
from common.ops.sampler import Sampler


def make_params(num_rows: int, device: torch.device) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.linspace(0.0, 1.5, num_rows, device=device),
        top_k=torch.arange(num_rows, dtype=torch.int32, device=device) * 3,
        top_p=torch.ones(num_rows, device=device),
        min_p=torch.zeros(num_rows, device=device),
        seed=torch.arange(num_rows, device=device),
    )


def test_without_kernels_it_is_the_reference() -> None:
    torch.manual_seed(12)
    device = torch.device("cpu")
    logits, params, positions = torch.randn(5, 100), make_params(5, device), torch.arange(5, dtype=torch.int32)
    tokens = Sampler("torch", 5, 100, device)(logits, params, positions)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens, reference.sample(logits, params, positions))


@pytest.mark.gpu
def test_with_kernels_it_draws_the_same_and_can_be_captured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(13)
    device = torch.device("cuda")
    sampler = Sampler("triton", 8, 3000, device)
    logits, params = torch.randn(5, 3000, device=device), make_params(5, device)
    positions = torch.arange(5, dtype=torch.int32, device=device)
    sampler(logits, params, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler(logits, params, positions)
    for shift in range(3):
        positions += shift
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert torch.equal(tokens, reference.sample(logits, params, positions))
