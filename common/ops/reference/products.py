"""Law of products: of plain matrices, and of codes of 8 or 4 bits with scales.

A block of numbers is quantized by its largest magnitude, which becomes the largest code; codes are rounded to the
nearest, ties to even. Products of codes are added up in fp32, and scales are applied to the sums of each block.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from common.ops.base import Scheme, Weight, float_elements, unpack
from common.ops.base.weight import SCHEMES

LARGEST = {Scheme.FP8: 448.0, Scheme.INT8: 127.0}
"""Largest codes; -128 is not used."""
MIDDLE = 8
"""Subtracted from codes of 4 bits where there are no offsets."""
WIDENED_ELEMENTS = 256 * 1024
"""Of a matrix made plain at once: what a CPU's cache holds, because fresh memory costs a fault each page."""
LEAST_MAGNITUDE = 1e-12
"""Taken for the largest magnitude of a block of zeros, whose codes are zeros with any scale."""


def quantize(x: Tensor, codes: torch.dtype, columns: int = 0) -> tuple[Tensor, Tensor]:
    """Return codes of `x [rows, width]`, and fp32 scales `[rows, blocks]` by which codes are multiplied.

    Args:
        columns: numbers of a row that share a scale; 0: all.
    """
    largest = LARGEST[SCHEMES[codes]]
    num_rows, width = x.shape
    columns = min(columns, width) or width
    blocks = functional.pad(x.float(), (0, -width % columns)).view(num_rows, -1, columns)
    magnitudes = blocks.abs().amax(-1).clamp(min=LEAST_MAGNITUDE)
    scales = magnitudes / torch.full_like(magnitudes, largest)  # a GPU would multiply by the inverse of a number
    exact = (blocks / scales[..., None]).clamp(-largest, largest).flatten(1)[:, :width]
    return (exact.round() if codes == torch.int8 else exact).to(codes), scales


def dequantized(weight: Weight) -> Tensor:
    """Return the elements of a matrix in fp32: `[out, in]`."""
    if weight.scales is None:
        return weight.data.float()
    if weight.is_weight_only:
        return _widened(weight, weight.scales)
    scales = weight.scales.repeat_interleave(weight.scale_rows, 0)[: weight.num_out]
    return weight.data.float() * scales.repeat_interleave(weight.scale_columns, 1)[:, : weight.num_in]


def _widened(weight: Weight, scales: Tensor) -> Tensor:
    """Return the elements of a matrix in a weight-only scheme in fp32."""
    if weight.factors is not None:
        return float_elements(unpack(weight.data), scales, weight.factors)
    codes = unpack(weight.data).float()
    if weight.scheme is Scheme.INT4 and weight.offsets is None:
        codes -= MIDDLE
    codes = codes.view(weight.num_out, -1, weight.scale_columns) * scales.float()[..., None]
    if weight.offsets is not None:
        codes += weight.offsets.float()[..., None]
    return codes.flatten(1)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return `x @ weight.T + bias` of `x [num_tokens, in]`, in the dtype of `x`; `x` is quantized as the weight is.

    With a weight-only scheme, `x` stays as it is, and products are added up in fp32.
    """
    if weight.scales is None:
        return functional.linear(x, weight.data, weight.bias)
    if weight.is_weight_only:
        return _linear_of_rows(x.float(), weight).to(x.dtype)
    codes, scales = quantize(x, weight.data.dtype, weight.scale_columns)
    product = multiplied(codes, scales, weight)
    return (product if weight.bias is None else product + weight.bias.float()).to(x.dtype)


def _linear_of_rows(x: Tensor, weight: Weight) -> Tensor:
    """Return the product of fp32 `x` and a matrix in a weight-only scheme, of which few rows are widened at a time."""
    out = torch.empty((x.shape[0], weight.num_out), device=x.device)
    step = max(1, WIDENED_ELEMENTS // weight.num_in)
    for begin in range(0, weight.num_out, step):
        rows = slice(begin, begin + step)
        bias, scales, offsets, factors = (
            None if each is None else each[rows]
            for each in (weight.bias, weight.scales, weight.offsets, weight.factors)
        )
        some = replace(weight, data=weight.data[rows], scales=scales, offsets=offsets, factors=factors)
        out[:, rows] = functional.linear(x, dequantized(some), None if bias is None else bias.float())
    return out


def multiplied(codes: Tensor, scales: Tensor, weight: Weight) -> Tensor:
    """Return the product of quantized activations and a matrix, without its bias: fp32 `[num_tokens, out]`."""
    assert weight.scales is not None, "a matrix of codes"
    of_rows = weight.scales.repeat_interleave(weight.scale_rows, 0)[: weight.num_out]
    total = torch.zeros((codes.shape[0], weight.num_out), device=codes.device)
    for block, begin in enumerate(range(0, weight.num_in, weight.scale_columns)):
        columns = slice(begin, begin + weight.scale_columns)
        sums = codes[:, columns].float() @ weight.data[:, columns].float().t()
        total += sums * scales[:, block, None] * of_rows[:, block]
    return total
