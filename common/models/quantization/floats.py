"""Rows of NVFP4 and of MXFP4 as floats of 4 bits are held: exactly, but for a matrix's scale that divides.

A scale that divides becomes a factor, its inverse, which fp32 rounds once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from common.models.quantization.dequantize import powers_of_2
from common.models.quantization.fp4 import Mxfp4, Nvfp4
from common.models.quantization.groups import Floats
from common.ops.base import float_codes, scale_bytes
from common.ops.base.floats import LARGEST_EXPONENT

ONE = 127
"""Exponent of 8 bits that means 1."""


def in_floats(format_: Nvfp4 | Mxfp4, tensors: Mapping[str, Tensor], num_rows: int) -> Floats:
    """Return rows of a matrix as they are held; of MXFP4 exponents of a row span no more than a scale holds."""
    packed, stored = tensors[format_.codes], tensors["weight_scale"]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).unflatten(1, (stored.shape[1], -1))
    if isinstance(format_, Mxfp4):
        largest = stored.amax(1, keepdim=True)
        factors = powers_of_2(largest) * 2.0**-LARGEST_EXPONENT
        scales = powers_of_2((ONE + LARGEST_EXPONENT) - (largest - stored))
    else:
        of_all = tensors[format_.matrix_scale].float()
        factors = (1.0 / of_all if format_.divides else of_all).expand(num_rows, 1)
        scales = stored.float()
    return Floats(float_codes(codes, scales), scale_bytes(scales), factors)
