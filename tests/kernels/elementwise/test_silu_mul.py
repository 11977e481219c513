"""The gate against the reference."""

import pytest
import torch

from common.kernels.elementwise.silu_mul import silu_mul
from common.ops import reference
from tests.kernels.conftest import AssertClose


@pytest.mark.parametrize(("num_tokens", "inner"), [(1, 9728), (3, 1025), (7, 5), (64, 1024)])
def test_equals_reference(
    num_tokens: int, inner: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * inner) * 4).to(device, dtype)
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy; infinity is right
def test_large_gates_saturate(device: torch.device, dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -1000.0, 3.0, 3.0, 3.0]]).to(device, dtype)
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), rtol=1e-2, atol=1e-6)


def test_no_tokens(device: torch.device, dtype: torch.dtype) -> None:
    assert silu_mul(torch.zeros((0, 12), device=device, dtype=dtype)).shape == (0, 6)
