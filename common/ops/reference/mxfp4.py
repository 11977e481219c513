"""Law of MXFP4, a format of weights (OCP Microscaling 1.0): 32 values of 4 bits share a power of two.

A value is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. The low bits of a byte are
the first of two values. A scale of `s` stands for `2 ** (s - 127)`.
"""

import torch
from torch import Tensor

from common.base.mxfp4 import GROUP

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the values of `packed [..., width / 2]` uint8 with `scales [..., width / 32]` uint8: fp32 `[..., width]`.

    A scale of 255 stands for NaN.
    """
    table = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    factors = torch.exp2(scales.float() - 127.0).masked_fill(scales == 255, torch.nan)
    return table[codes.long()] * factors.repeat_interleave(GROUP, dim=-1)
