"""Floats of 4 bits in groups of 16 columns, as they lie in memory: an element is `value * (scale * factor)`.

A code is e2m1 with the sign as its lowest bit, above it the bit of mantissa and two of exponent. `pack` packs codes.
A scale is a byte of five bits of exponent and three of mantissa: `(1 + mantissa / 8) * 2 ** (exponent - 22)`. Each
row has a factor in fp32. Signs of scales go to codes, and a group with a scale of 0 has codes of 0. So NVFP4 and MXFP4
are held exactly.
"""

import torch
from torch import Tensor

GROUP = 16
"""Columns that share a scale."""
LARGEST_EXPONENT = 8
"""Of a scale: 448 is the largest of e4m3."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_SHIFT = 7
"""Power of two that brings scales to the exponents of float16, and the bits of float16 behind the byte."""


def float_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes as they are held, of those with the sign highest.

    Args:
        codes: uint8 `[num_rows, groups, columns of a group]`.
        scales: fp32 `[num_rows, groups]`, of either sign.
    """
    held = (codes & 7) << 1 | codes >> 3
    held = held ^ (scales < 0)[..., None].to(torch.uint8)
    return held * (scales != 0)[..., None].to(torch.uint8)


def scale_bytes(scales: Tensor) -> Tensor:
    """Return bytes of fp32 scales, without their signs; exact for numbers of e4m3, and for powers of two near 1."""
    halves = (scales.abs() * 2.0**_SCALE_SHIFT).half()
    return (halves.view(torch.int16) >> _SCALE_SHIFT).to(torch.uint8)


def float_elements(codes: Tensor, scales: Tensor, factors: Tensor) -> Tensor:
    """Return elements in fp32 of codes `[num_rows, width]`, bytes `[num_rows, groups]` and factors `[num_rows, 1]`."""
    table = torch.tensor([each for one in _MAGNITUDES for each in (one, -one)], device=codes.device)
    wide = ((scales.int() << 20) + (105 << 23)).view(torch.float32)
    groups: Tensor = table[codes.int()].unflatten(1, (scales.shape[1], -1)) * (wide * factors)[..., None]
    return groups.flatten(1)
