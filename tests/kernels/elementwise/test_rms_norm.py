"""RMSNorm against the reference."""

import pytest
import torch

from common.kernels.elementwise.rms_norm import _rms_norm_kernel, rms_norm
from common.ops import reference
from tests.kernels.conftest import AssertClose
from tests.support.far_memory import far_apart


@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 64), (1, 2560), (3, 33), (5, 1024), (17, 1)])
def test_equals_reference(
    num_tokens: int, hidden: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x = (torch.randn(num_tokens, hidden) * 3).to(device, dtype)
    weight = torch.randn(hidden).to(device, dtype)
    out = rms_norm(x, weight, 1e-6)
    if num_tokens == 0:
        assert out.shape == x.shape
        return
    assert_close(out, reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(("num_tokens", "hidden", "splits"), [(1, 2560, 2), (3, 33, 1), (5, 1024, 8)])
def test_parts_are_added_first(
    num_tokens: int, hidden: int, splits: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    x, parts = torch.randn(num_tokens, hidden).to(device, dtype), torch.randn(splits, num_tokens, hidden).to(device)
    weight = torch.randn(hidden).to(device, dtype)
    whole = (x.float() + parts.sum(0)).to(dtype)
    out = rms_norm(x, weight, 1e-6, parts=parts)
    assert_close(x, whole)
    assert_close(out, reference.rms_norm(whole, weight, 1e-6))


def test_parts_may_be_far_apart(device: torch.device) -> None:
    parts, last = far_apart(device, 16)
    last.fill_(5)
    x, weight, out = (torch.ones(16, device=device) for _ in range(3))
    shape = {"HIDDEN": 1 << 30, "BLOCK": 16, "SPLITS": 3, "PDL": False}  # a program for the first columns of a wide row
    _rms_norm_kernel[(1,)](x, weight, parts, out, 16, 1e-6, **shape)
    assert x.tolist() == [6.0] * 16


def test_rows_may_be_strided(device: torch.device, dtype: torch.dtype, assert_close: AssertClose) -> None:
    wide = torch.full((6, 200), float("nan")).to(device, dtype)
    x = wide[:, 40:141]
    x.copy_(torch.randn(6, 101))
    weight = torch.randn(101).to(device, dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match="weight"):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
    with pytest.raises(AssertionError, match="contiguous"):
        rms_norm(torch.zeros(8, 2).t(), torch.zeros(8), 1e-6)
