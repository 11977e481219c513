"""Sum of a product's parts against PyTorch."""

import pytest
import torch

from common.kernels.products.join_parts import _join_parts_kernel, join_parts
from tests.kernels.conftest import AssertClose
from tests.support.far_memory import far_apart


@pytest.mark.parametrize(("splits", "num_tokens", "width"), [(3, 5, 200), (1, 1, 1), (8, 2, 512)])
def test_parts_are_added_to_rows(
    splits: int, num_tokens: int, width: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    parts, rows = torch.randn(splits, num_tokens, width).to(device), torch.randn(num_tokens, width).to(device, dtype)
    expected = (rows.float() + parts.sum(0)).to(dtype)
    assert join_parts(parts, rows) is rows
    assert_close(rows, expected)


def test_parts_may_be_far_apart(device: torch.device) -> None:
    parts, last = far_apart(device, 16)
    last.fill_(5)
    rows = torch.ones(16, device=device)
    _join_parts_kernel[(1,)](parts, rows, 1 << 30, SPLITS=3, BLOCK=16, PDL=False)
    assert rows.tolist() == [6.0] * 16
