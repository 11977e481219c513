"""The law of quantized products: codes by hand, and what a scale of each form covers."""

import pytest
import torch

from common.ops.base import BLOCK, Scheme, Weight
from common.ops.reference import dequantized, linear, multiplied, quantize

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EACH = pytest.mark.parametrize("codes", [FP8, INT8], ids=["fp8", "int8"])


@EACH
def test_the_largest_number_of_a_row_becomes_the_largest_code(codes: torch.dtype) -> None:
    x = torch.tensor([[1.0, -4.0, 0.5], [0.0, 0.0, 0.0], [1e30, -1e30, 3.0]])
    made, scales = quantize(x, codes)
    largest = 448.0 if codes == FP8 else 127.0
    assert scales[0] == 4.0 / largest and scales[1] > 0
    assert made[0, 1].float() == -largest and (made[1].float() == 0).all() and made[2, 0].float() == largest
    assert torch.isfinite(made.float()).all()


def test_codes_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    ints, scales = quantize(torch.tensor([[127.0, 2.5, 3.5, -2.5, 2.51]]), INT8)
    assert scales == 1.0 and ints.tolist() == [[127, 2, 4, -2, 3]]
    floats, scales = quantize(torch.tensor([[448.0, 17.0, 19.0, 0.0009, -18.5]]), FP8)
    assert scales == 1.0 and floats.float().tolist() == [[448.0, 16.0, 20.0, 0.0, -18.0]]


@EACH
@pytest.mark.parametrize("width", [1, 127, 128, 300])
def test_each_block_of_columns_has_a_scale(codes: torch.dtype, width: int) -> None:
    x = torch.randn(3, width) * 10.0 ** (torch.arange(width) // BLOCK)
    made, scales = quantize(x, codes, BLOCK)
    assert made.shape == x.shape and scales.shape == (3, -(-width // BLOCK))
    for block, begin in enumerate(range(0, width, BLOCK)):
        alone, scale = quantize(x[:, begin : begin + BLOCK], codes)
        assert torch.equal(made[:, begin : begin + BLOCK].float(), alone.float())
        assert torch.equal(scales[:, block : block + 1], scale)


@EACH
@pytest.mark.parametrize("form", ["rows", "blocks", "columns"])
def test_a_product_is_that_of_what_codes_stand_for(codes: torch.dtype, form: str) -> None:
    torch.manual_seed(1)
    num_out, num_in = 200, 300
    blocks = (-(-num_out // BLOCK), -(-num_in // BLOCK))
    shape = {"rows": (num_out, 1), "blocks": blocks, "columns": (num_out, blocks[1])}[form]
    scales = torch.rand(shape) * 100.0 ** torch.rand(shape)  # scales that cannot be taken for one another
    weight = Weight(quantize(torch.randn(num_out, num_in), codes)[0], torch.randn(num_out), scales, torch.float32)
    assert weight.scheme is (Scheme.FP8 if codes == FP8 else Scheme.INT8) and weight.dtype == torch.float32
    elements = dequantized(weight)
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299)):
        scale = scales[row // weight.scale_rows, 0 if form == "rows" else column // BLOCK]
        assert elements[row, column] == weight.data[row, column].float() * scale
    x = torch.randn(5, num_in) * 10.0 ** (torch.arange(num_in) // BLOCK)
    x_codes, x_scales = quantize(x, codes, weight.scale_columns)
    rounded = dequantized(Weight(x_codes, None, x_scales))
    expected = rounded.double() @ elements.double().t()
    assert error_of(multiplied(x_codes, x_scales, weight), expected) < 1e-5
    assert weight.bias is not None
    assert error_of(linear(x, weight), expected + weight.bias.double()) < 1e-5
    exact = x.double() @ elements.double().t() + weight.bias.double()
    assert error_of(linear(x, weight), exact) < (4e-2 if codes == FP8 else 1.5e-2)


def error_of(product: torch.Tensor, expected: torch.Tensor) -> float:
    return float((product.double() - expected).norm() / expected.norm())
