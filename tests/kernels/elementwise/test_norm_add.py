"""Norm of a product and its addition against the reference."""

import pytest
import torch

from common.kernels.elementwise.norm_add import norm_add
from common.ops import reference
from tests.kernels.conftest import AssertClose


@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "splits"), [(3, 33, 3), (0, 64, 1), (1, 2560, 2), (5, 1024, 1), (7, 1, 8)]
)
def test_equals_reference(
    num_tokens: int,
    hidden: int,
    splits: int,
    scale: float | None,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    parts = torch.randn(splits, num_tokens, hidden, device=device) * 3
    weight, rows = torch.randn(hidden).to(device, dtype), torch.randn(num_tokens, hidden).to(device, dtype)
    factor = None if scale is None else torch.full((1,), scale, device=device)
    expected = reference.norm_add(parts.sum(0), weight, 1e-6, rows, factor)
    out = norm_add(parts, weight, 1e-6, rows, scale=factor)
    assert out is rows
    if num_tokens:
        assert_close(out, expected)


def test_the_product_may_have_the_dtype_of_the_rows(
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    product, rows = torch.randn(4, 100).to(device, dtype), torch.randn(4, 100).to(device, dtype)
    weight = torch.randn(100, device=device)
    expected = reference.norm_add(product, weight, 1e-5, rows)
    assert_close(norm_add(product[None], weight, 1e-5, rows), expected)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match="weight"):
        norm_add(torch.zeros(1, 2, 8), torch.zeros(7), 1e-6, torch.zeros(2, 8))
    with pytest.raises(AssertionError, match="parts"):
        norm_add(torch.zeros(2, 8), torch.zeros(8), 1e-6, torch.zeros(2, 8))
    with pytest.raises(AssertionError, match="contiguous"):
        norm_add(torch.zeros(1, 2, 8), torch.zeros(8), 1e-6, torch.zeros(8, 2).t())
