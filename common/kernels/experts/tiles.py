"""Tiles of the products of experts, by the number of tokens."""

from typing import NamedTuple

import triton

from common.kernels.base.gpu import Gpu

MANY_TOKENS, MOST_TOKENS = 128, 1024
"""From the next count on, tiles are larger."""


class ExpertTiles(NamedTuple):
    """Sizes of a program's tiles: pairs of a token and an expert, outputs, and elements of K at a time."""

    pairs: int
    block_n: int
    block_k: int
    stages: int
    warps: int


def expert_tiles(num_tokens: int, num_slots: int, num_experts: int, element_size: int, gpu: Gpu) -> ExpertTiles:
    """Return tiles that an expert's pairs fill, as far as their mean tells.

    Few pairs take narrow tiles with long rows, because the time is that of reading matrices. `block_n` is for a single
    matrix; a tile of gate and up has half of each.
    """
    if num_tokens <= MANY_TOKENS:
        return _fitting(16, 64, 128, 4, 4, element_size, gpu)
    typical = 4 * MOST_TOKENS if num_tokens > MOST_TOKENS else MOST_TOKENS // 2
    pairs = min(128, max(16, triton.next_power_of_2(typical * num_slots // num_experts)))
    return _fitting(pairs, 128, 64, 4, 8 if pairs == 128 else 4, element_size, gpu)


def _fitting(
    pairs: int, block_n: int, block_k: int, stages: int, warps: int, element_size: int, gpu: Gpu
) -> ExpertTiles:
    """Return the tiles with as many stages as fit into shared memory."""
    block_k = block_k * 2 // element_size
    stage_bytes = (pairs + block_n) * block_k * element_size
    return ExpertTiles(pairs, block_n, block_k, min(stages, max(2, gpu.shared_bytes // stage_bytes - 1)), warps)
