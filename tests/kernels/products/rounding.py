"""Bound of the error of elements that are made of codes in fp32 and rounded to 16 bits."""

import torch
from torch import Tensor

EXCESS = {4: 136, 8: 32_768 + 128}
"""At most what fp32 has beside a code before it is scaled, by the bits of a code."""


def rounding(codes: Tensor, scales: Tensor, offsets: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return how far `codes * scales + offsets` in a dtype may be from the exact element, in fp64.

    `less = offset - excess * scale` is rounded to fp32, so is `(excess + code) * scale + less`, and then the element to
    16 bits. Each is off by a unit times itself; a small element by half of the least number, too.
    """
    unit, of_fp32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    later = (1 + of_fp32) * (1 + unit)
    elements = (codes.double() * scales.double() + offsets.double()).abs()
    less = offsets.double().abs() + EXCESS[bits] * scales.double().abs()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    return elements * (later - 1) + less * of_fp32 * later + least
