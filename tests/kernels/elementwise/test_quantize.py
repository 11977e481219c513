"""Codes and scales of rows against the law, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.codes import GROUP, codes_of, widened
from common.kernels.elementwise.quantize import quantize
from common.kernels.elementwise.rms_norm import quantized_rms_norm, rms_norm
from common.ops import reference

CODES = pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
GROUPED = pytest.mark.parametrize("is_grouped", [False, True], ids=["rows", "groups"])


def assert_equal(made: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours.float(), theirs.float())


@CODES
@GROUPED
@pytest.mark.parametrize(("num_rows", "width"), [(3, 300), (1, 2560), (5, 128), (2, 9), (17, 1024)])
def test_equals_the_law(
    num_rows: int, width: int, is_grouped: bool, codes: torch.dtype, device: torch.device, dtype: torch.dtype
) -> None:
    wide = torch.full((num_rows, width + 7), torch.nan, device=device, dtype=dtype)
    x = wide[:, 3 : width + 3]
    x.copy_(torch.randn(num_rows, width) * 10.0 ** torch.randint(-3, 3, (num_rows, 1)))
    x[0, : width // 2] = 0.0
    x[-1] = 0.0
    made = quantize(x, codes, is_grouped=is_grouped)
    assert made[1].stride(0) == 1, "scales of a column are contiguous"
    assert_equal(made, reference.quantize(x, codes, GROUP if is_grouped else 0))


def test_no_rows_have_no_codes(device: torch.device, dtype: torch.dtype) -> None:
    codes, scales = quantize(torch.empty(0, 5, device=device, dtype=dtype), torch.int8)
    assert codes.shape == (0, 5) and scales.shape == (0, 1)


@CODES
@GROUPED
@pytest.mark.parametrize(("num_tokens", "hidden", "splits"), [(3, 300, 0), (1, 2560, 2), (5, 1024, 8), (2, 129, 1)])
def test_a_norm_quantizes_what_it_would_write(
    num_tokens: int, hidden: int, splits: int, is_grouped: bool, codes: torch.dtype,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    x, weight = torch.randn(num_tokens, hidden).to(device, dtype), torch.randn(hidden).to(device, dtype)
    parts = torch.randn(splits, num_tokens, hidden).to(device) if splits else None
    plain, other = x.clone(), x.clone()
    normed = rms_norm(plain, weight, 1e-6, parts=parts)
    made = quantized_rms_norm(other, weight, 1e-6, codes, is_grouped=is_grouped, parts=parts)
    assert torch.equal(plain, other), "parts are added in place"
    assert_equal(made, reference.quantize(normed, codes, GROUP if is_grouped else 0))


@triton.jit  # type: ignore[untyped-decorator]
def _codes_kernel(x_ptr, codes_ptr, back_ptr, BLOCK: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = codes_of(tl.load(x_ptr + at), tl.full((BLOCK,), 1.0, tl.float32), 448.0, NATIVE)
    tl.store(codes_ptr + at, codes)
    tl.store(back_ptr + at, widened(codes))


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_every_number_of_16_bits_gets_the_code_that_torch_gives_it(is_native: bool, device: torch.device) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = torch.cat((bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()))
    x = x[torch.isfinite(x)]
    x = torch.cat((x, x.new_zeros(-len(x) % 1024))).to(device)
    codes, back = torch.empty(len(x), dtype=torch.uint8, device=device), torch.empty_like(x)
    _codes_kernel[(len(x) // 1024,)](x, codes, back, 1024, is_native)
    expected = x.clamp(-448.0, 448.0).cpu().to(torch.float8_e4m3fn)
    assert torch.equal(codes.cpu().view(torch.float8_e4m3fn).float(), expected.float())
    assert torch.equal(back.cpu(), expected.float())
