"""Codes of 4 or 8 bits, packed for products that read a matrix straight into the operands of a matrix unit.

A row is packed in blocks of 64 bytes, four words of 32 bits for each of four threads. A thread that loads its 16 bytes
at once has what it multiplies of a block.

Of 4 bits a block is BLOCK columns: 4 groups of 32 columns. Each group has 4 eights, each of 4 pairs. 16 bytes hold the
same pair of all eights, and a word is of one group. Its numbers of 16 bits hold columns `c`, `c + 8`, `c + 16` and
`c + 24`, from the lowest bits on. The second number of a word holds the columns behind those of the first.

Of 8 bits a block is half as many columns: 4 groups of 16 columns, each of 2 eights. A number of 16 bits holds columns
`c` and `c + 8`; all else is alike.
"""

import torch
from torch import Tensor

from common.ops.base.weight import BLOCK

PARTS = (4, 2, 2, 4, 2)
"""Columns of a block of 4 bits, from the highest bits of a column's number: the group, 16, 8, the pair, 1."""
PLACES = (0, 1, 5, 2, 6, 3, 4)
"""Dimensions `[rows, blocks, *PARTS]` in the order in which nibbles lie in memory."""
BYTE_BLOCK = BLOCK // 2
BYTE_PARTS = (4, 2, 4, 2)
"""Columns of a block of 8 bits: the group, 8, the pair, 1."""
BYTE_PLACES = (0, 1, 4, 2, 5, 3)


def pack(codes: Tensor) -> Tensor:
    """Return codes `[rows, columns]` packed: 0 to 15 in uint8 as uint8 `[rows, columns / 2]`, int8 as int8.

    Columns are a multiple of BLOCK, or of BYTE_BLOCK of int8.
    """
    num_rows, num_columns = codes.shape
    if codes.dtype == torch.int8:
        blocks = codes.view(num_rows, num_columns // BYTE_BLOCK, *BYTE_PARTS)
        return blocks.permute(BYTE_PLACES).reshape(num_rows, num_columns)
    assert codes.dtype == torch.uint8 and num_columns % BLOCK == 0, f"{codes.dtype}, {num_columns} columns"
    nibbles = codes.view(num_rows, num_columns // BLOCK, *PARTS).permute(PLACES)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(num_rows, num_columns // 2)


def unpack(packed: Tensor) -> Tensor:
    """Return what `pack` was given, in its dtype."""
    if packed.dtype == torch.int8:
        return _ordered(packed, BYTE_BLOCK, BYTE_PARTS, BYTE_PLACES)
    return _ordered(torch.stack((packed & 15, packed >> 4), -1).flatten(1), BLOCK, PARTS, PLACES)


def _ordered(codes: Tensor, block: int, parts: tuple[int, ...], places: tuple[int, ...]) -> Tensor:
    """Return codes in the order of their columns."""
    columns = torch.arange(block, device=codes.device).view(1, 1, *parts).permute(places).flatten()
    blocks = torch.arange(0, codes.shape[1], block, device=codes.device)
    found = (blocks[:, None] + columns.argsort()).flatten()
    return codes.float().index_select(1, found).to(codes.dtype)  # a CPU gathers floats much faster than bytes
