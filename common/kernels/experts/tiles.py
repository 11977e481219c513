"""Tiles of the products of experts, by the number of tokens."""

from typing import NamedTuple

import triton

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
    num_tokens: int,
    num_slots: int,
    num_experts: int,
    element_size: int,
    gpu: Gpu,
    *,
    is_packed: bool = False,
    has_codes: bool = False,
) -> ExpertTiles:
    """Return tiles that an expert's pairs fill, as far as their mean tells.

    Few pairs take narrow tiles with long rows, because the time is that of reading matrices. Matrices in MXFP4 take as
    long as it takes to bring values into 16 bits. So their tiles have few lanes for pairs that may be missing. Codes of
    8 bits take the tiles of plain matrices, with twice the columns where shared memory has room.
    """
    typical = 4 * MOST_TOKENS if num_tokens > MOST_TOKENS else MOST_TOKENS // 2
    pairs = min(128, max(16, triton.next_power_of_2(typical * num_slots // num_experts)))
    if num_tokens <= MANY_TOKENS:
        tiles = ExpertTiles(16, 64, 64, 128, 3, 2) if is_packed else ExpertTiles(16, 32, 64, 128, 4, 4)
        if is_packed and num_tokens <= FEW_TOKENS:
            tiles = ExpertTiles(8, 16 if num_tokens == 1 else 32, 16 if num_tokens == 1 else 32, 128, 3, 2, splits=2)
    elif is_packed:
        tiles = ExpertTiles(pairs, 128, 128, 128, 3, 8 if pairs == 128 else 4)
    else:
        tiles = ExpertTiles(pairs, 64, 128, 128 if has_codes else 64, 4, 8 if pairs == 128 else 4)
    bits = 4 if is_packed else 8 if has_codes else 8 * element_size
    if has_codes and _most_stages(tiles, element_size, gpu, bits) < 2:
        tiles = tiles._replace(block_k=tiles.block_k // 2)
    stages = min(tiles.stages, max(2, _most_stages(tiles, element_size, gpu, bits)))
    return tiles._replace(block_k=tiles.block_k * 2 // element_size, stages=stages)


def _most_stages(tiles: ExpertTiles, element_size: int, gpu: Gpu, bits: int) -> int:
    """Return the stages that fit into shared memory, with room for another; an element of weights has `bits`."""
    block_k, rows = tiles.block_k * 2 // element_size, max(2 * tiles.gate_rows, tiles.down_rows)
    stage_bytes = (tiles.pairs * block_k * element_size + rows * block_k * bits // 8) * tiles.splits
    return gpu.shared_bytes // stage_bytes - 1
