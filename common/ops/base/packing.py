"""Codes of 4 bits, packed for products that read a matrix straight into the operands of a matrix unit.

A row is packed in blocks of BLOCK columns: 4 groups of 32 columns. Each group has 4 eights, each of 4 pairs. 16 bytes
hold the same pair of all eights, so that a thread that loads them at once has what it multiplies of a block. A word of
32 bits is of one group. Its numbers of 16 bits hold columns `c`, `c + 8`, `c + 16` and `c + 24`, from the lowest bits
on. The second number of a word holds the columns behind those of the first.
"""

import torch
from torch import Tensor

from common.ops.base.weight import BLOCK

PARTS = (4, 2, 2, 4, 2)
"""Columns of a block, from the highest bits of a column's number: the group, 16, 8, the pair, 1."""
PLACES = (0, 1, 5, 2, 6, 3, 4)
"""Dimensions `[rows, blocks, *PARTS]` in the order in which nibbles lie in memory."""


def pack(codes: Tensor) -> Tensor:
    """Return codes `[rows, columns]` of 0 to 15, in uint8, packed: uint8 `[rows, columns / 2]`.

    Columns are a multiple of BLOCK.
    """
    num_rows, num_columns = codes.shape
    assert codes.dtype == torch.uint8 and num_columns % BLOCK == 0, f"{codes.dtype}, {num_columns} columns"
    nibbles = codes.view(num_rows, num_columns // BLOCK, *PARTS).permute(PLACES)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(num_rows, num_columns // 2)


def unpack(packed: Tensor) -> Tensor:
    """Return what `pack` was given: uint8 `[rows, columns]`."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    columns = torch.arange(BLOCK, device=packed.device).view(1, 1, *PARTS).permute(PLACES).flatten()
    blocks = torch.arange(0, nibbles.shape[1], BLOCK, device=packed.device)
    places = (blocks[:, None] + columns.argsort()).flatten()
    return nibbles.float().index_select(1, places).to(torch.uint8)  # a CPU gathers floats much faster than bytes
