"""Tiles of the products of experts, by the number of tokens."""

from typing import NamedTuple

import triton

from common.kernels.base.expert_operands import PACKED, Form
from common.kernels.base.gpu import Gpu

FEW_TOKENS, MANY_TOKENS, MOST_TOKENS = 16, 128, 1024
"""From the next count on, tiles are larger."""


class ExpertTiles(NamedTuple):
    """Sizes of a program's tiles: pairs of a token and an expert, outputs, and elements of K at a time."""

    pairs: int
    gate_rows: int  # outputs of gate, and as many of up
    down_rows: int
    block_k: int
    stages: int
    warps: int
    splits: int = 1  # warps that share the columns of a row; 1, or `warps`


def expert_tiles(
    num_tokens: int, num_slots: int, num_experts: int, element_size: int, gpu: Gpu, form: Form = Form.PLAIN
) -> ExpertTiles:
    """Return tiles that an expert's pairs fill, as far as their mean tells.

    Few pairs take narrow tiles with long rows, because the time is that of reading matrices. Elements of 4 bits take as
    long as it takes to bring values into 16 bits. So their tiles have few lanes for pairs that may be missing. Codes
    take the tiles of plain matrices for many pairs, with twice the columns where shared memory has room.
    """
    typical = 4 * MOST_TOKENS if num_tokens > MOST_TOKENS else MOST_TOKENS // 2
    pairs = min(128, max(16, triton.next_power_of_2(typical * num_slots // num_experts)))
    if num_tokens <= MANY_TOKENS:
        tiles = ExpertTiles(16, 64, 64, 128, 3, 2) if form in PACKED else ExpertTiles(16, 32, 64, 128, 4, 4)
        if form in PACKED and num_tokens <= FEW_TOKENS:
            tiles = ExpertTiles(8, 16 if num_tokens == 1 else 32, 16 if num_tokens == 1 else 32, 128, 3, 2, splits=2)
    elif form is Form.MXFP4:
        tiles = ExpertTiles(pairs, 128, 128, 128, 3, 8 if pairs == 128 else 4)
    else:
        tiles = ExpertTiles(pairs, 64, 128, 64 if form is Form.PLAIN else 128, 4, 8 if pairs == 128 else 4)
        if form is Form.INT4:  # registers hold sums of a group beside those of all
            tiles = ExpertTiles(min(pairs, 64), 64, 128, 128, 3, 4)
    if form is Form.BYTES and _most_stages(tiles, element_size, gpu, form) < 2:
        tiles = tiles._replace(block_k=tiles.block_k // 2)
    stages = min(tiles.stages, max(2, _most_stages(tiles, element_size, gpu, form)))
    return tiles._replace(block_k=_columns(tiles, element_size, form), stages=stages)


def _columns(tiles: ExpertTiles, element_size: int, form: Form) -> int:
    """Return the columns of a tile, which are half as many of fp32; a tile of INT4 is a block."""
    return tiles.block_k if form is Form.INT4 else tiles.block_k * 2 // element_size


def _most_stages(tiles: ExpertTiles, element_size: int, gpu: Gpu, form: Form) -> int:
    """Return the stages that fit into shared memory, with room for another."""
    block_k, rows = _columns(tiles, element_size, form), max(2 * tiles.gate_rows, tiles.down_rows)
    bits = 4 if form in PACKED else 8 if form is Form.BYTES else 8 * element_size
    stage_bytes = (tiles.pairs * block_k * element_size + rows * block_k * bits // 8) * tiles.splits
    return gpu.shared_bytes // stage_bytes - 1
