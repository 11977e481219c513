"""Codes of 4 and 8 bits in the places that kernels read them from, and products of matrices that are widened."""

import pytest
import torch

from common.ops.base import Scheme, Weight, float_codes, float_elements, pack, scale_bytes, unpack
from common.ops.reference import dequantized, linear


def test_columns_lie_where_kernels_read_them() -> None:
    """The bytes of a row, by loops; a nibble's place is spelled out once more."""
    codes = torch.randint(0, 16, (2, 256), dtype=torch.uint8)
    packed = pack(codes).view(torch.uint16).tolist()
    for row in range(2):
        for number in range(64):
            block, rest = divmod(number, 32)
            pair, rest = divmod(rest, 8)
            group, second = divmod(rest, 2)
            column = block * 128 + group * 32 + pair * 2 + second
            nibbles = [int(codes[row, column + more]) for more in (0, 8, 16, 24)]
            assert packed[row][number] == sum(nibble << 4 * place for place, nibble in enumerate(nibbles))


def test_bytes_lie_where_kernels_read_them() -> None:
    codes = torch.randint(-128, 128, (2, 192), dtype=torch.int8)
    packed = pack(codes)
    for row in range(2):
        for place in range(192):
            block, rest = divmod(place, 64)
            pair, rest = divmod(rest, 16)
            group, rest = divmod(rest, 4)
            second, eight = divmod(rest, 2)
            assert packed[row, place] == codes[row, block * 64 + group * 16 + eight * 8 + pair * 2 + second]


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("dtype", "num_columns"), [(torch.uint8, 128), (torch.uint8, 640), (torch.int8, 576)], ids=str)
def test_unpacking_gives_back_what_was_packed(num_rows: int, dtype: torch.dtype, num_columns: int) -> None:
    codes = torch.randint(*((0, 16) if dtype == torch.uint8 else (-128, 128)), (num_rows, num_columns), dtype=dtype)
    unpacked = unpack(pack(codes))
    assert unpacked.dtype == dtype and torch.equal(unpacked, codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_offsets", [False, True], ids=["middle", "offsets"])
@pytest.mark.parametrize("is_wide", [False, True], ids=["int4", "int8"])
@pytest.mark.parametrize("group", [32, 128, 256])
def test_elements_are_scaled_by_groups(group: int, is_wide: bool, has_offsets: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    rows, columns = 3, 256
    codes = torch.randint(-128, 128, (rows, columns)) if is_wide else torch.randint(0, 16, (rows, columns))
    scales = (10.0 ** torch.rand(rows, columns // group)).to(dtype)
    offsets = torch.randn(rows, columns // group).to(dtype) if has_offsets else None
    data = pack(codes.to(torch.int8 if is_wide else torch.uint8))
    weight = Weight(data, torch.randn(rows), scales, torch.float32, offsets, is_wide)
    assert weight.scheme is (Scheme.WIDE_INT8 if is_wide else Scheme.INT4)
    assert (weight.num_in, weight.scale_columns, weight.is_weight_only) == (columns, group, True)
    elements = dequantized(weight)
    for row in range(rows):
        for column in (0, 31, 32, 127, 128, 255):
            place = (row, column // group)
            code = int(codes[row, column]) - (0 if is_wide or has_offsets else 8)
            value = code * float(scales[place]) + (0.0 if offsets is None else float(offsets[place]))
            assert float(elements[row, column]) == pytest.approx(value, rel=1e-6, abs=1e-5)
    x = torch.randn(4, columns)
    expected = x.double() @ elements.double().t() + weight.bias.double()  # type: ignore[union-attr]
    assert torch.allclose(linear(x, weight).double(), expected, atol=1e-3)


def test_floats_are_values_times_scales_and_factors() -> None:
    """By the definitions of e2m1 and e4m3, a code and a scale at a time; signs of scales go to codes."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-each for each in values]
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = scales[scales.isfinite()].view(-1, 2)  # two groups of 16 a row
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 2, 1)
    held, factors = float_codes(codes, scales), torch.rand(len(scales), 1)
    found = float_elements(held.flatten(1), scale_bytes(scales), torch.ones_like(factors))
    assert torch.equal(found, (torch.tensor(values) * scales[..., None]).flatten(1))
    scaled = float_elements(held.flatten(1), scale_bytes(scales), factors)
    assert torch.equal(scaled, (torch.tensor(values) * (scales * factors)[..., None]).flatten(1))
    data = pack(held.flatten(1).repeat(1, 4))
    weight = Weight(data, None, scale_bytes(scales).repeat(1, 4), torch.float32, factors=factors)
    assert (weight.scheme, weight.num_in, weight.scale_columns, weight.is_weight_only) == (Scheme.FP4, 128, 16, True)
    assert torch.equal(dequantized(weight), scaled.repeat(1, 4))
    assert torch.equal(linear(torch.eye(128), weight), dequantized(weight).t())
