"""The gate against the reference."""

import pytest
import torch

from common.base.activation import Activation
from common.kernels.base.gate import ACTIVATIONS
from common.kernels.elementwise.gate_mul import gate_mul
from common.ops import reference
from tests.kernels.conftest import AssertClose

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; infinity is right


def test_every_activation_is_computed() -> None:
    assert set(ACTIVATIONS) == {each.value for each in Activation}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("num_tokens", "inner"), [(1, 9728), (3, 1025), (7, 5), (64, 1024)])
def test_equals_reference(
    num_tokens: int,
    inner: int,
    activation: Activation,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * inner) * 4).to(device, dtype)
    assert_close(gate_mul(gate_up, activation), reference.gate_mul(gate_up, activation))


@pytest.mark.parametrize("activation", Activation)
def test_large_gates_saturate(activation: Activation, device: torch.device, dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -1000.0, 3.0, 3.0, 3.0]]).to(device, dtype)
    ours, law = gate_mul(gate_up, activation), reference.gate_mul(gate_up, activation)
    torch.testing.assert_close(ours, law, rtol=1e-2, atol=1e-6)


def test_no_tokens(device: torch.device, dtype: torch.dtype) -> None:
    assert gate_mul(torch.zeros((0, 12), device=device, dtype=dtype)).shape == (0, 6)
