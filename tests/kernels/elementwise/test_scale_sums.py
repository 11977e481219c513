"""Sums of codes times their scales, with every neighbour fused in."""

import pytest
import torch

from common.base.activation import Activation
from common.kernels.elementwise.scale_sums import scale_sums
from common.ops import reference
from tests.kernels.conftest import AssertClose


@pytest.mark.parametrize("sums_dtype", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize(("has_bias", "gate"), [(False, None), (True, None), (False, "silu")])
@pytest.mark.parametrize(("m", "n"), [(3, 1500), (1, 33), (65, 8)])
def test_equals_the_law(
    m: int, n: int, has_bias: bool, gate: str | None, sums_dtype: torch.dtype,
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose,
) -> None:  # fmt: skip
    num_rows = n if gate is None else 2 * n
    sums = torch.randint(-(1 << 20), 1 << 20, (m, num_rows)).to(device, sums_dtype)
    x_scales, scales = (torch.rand(count, 1).to(device) * 1e-3 for count in (m, num_rows))
    bias = torch.randn(n).to(device, dtype)
    expected = sums.double() * x_scales.double() * scales.double().t()
    if gate is not None:
        expected = reference.gate_mul(expected, Activation(gate))
    if has_bias:
        expected = expected + bias.double()
    out = torch.empty(m, n, device=device, dtype=dtype)
    made = scale_sums(sums, x_scales, scales, out, bias=bias if has_bias else None, activation=gate)
    assert made is out
    assert_close(out, expected.to(dtype))
