"""Codes of 4 bits of experts' matrices, in the order in which kernels read them.

A row is packed in blocks of BLOCK columns, of which each quarter has 32. The number of 16 bits at place `i` of a block
holds column `i` of each quarter, the first quarter in the lowest bits.
"""

import torch
from torch import Tensor

from common.ops.base.weight import BLOCK

PARTS = (2, 2, BLOCK // 4)
"""Columns of a block: the byte of a number, the half of a byte, the place of the number."""


def pack_quarters(codes: Tensor) -> Tensor:
    """Return codes 0 to 15 `[rows, columns]` uint8 packed: uint8 `[rows, columns / 2]`."""
    num_rows, num_columns = codes.shape
    assert codes.dtype == torch.uint8 and num_columns % BLOCK == 0, f"{codes.dtype}, {num_columns} columns"
    halves = codes.view(num_rows, num_columns // BLOCK, *PARTS)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).mT.reshape(num_rows, num_columns // 2)


def unpack_quarters(packed: Tensor) -> Tensor:
    """Return what `pack_quarters` was given."""
    pairs = packed.view(packed.shape[0], -1, BLOCK // 4, 2).mT
    return torch.stack((pairs & 15, pairs >> 4), -2).reshape(packed.shape[0], -1)
