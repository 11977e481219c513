"""Pairs of a token and an expert, sorted by expert, so that a product reads an expert's matrix for all of them.

Each expert has a program, and padding has another. A program counts the pairs of experts before its own, which gives
its first place. Then the program writes its pairs in their order. Nothing depends on the order in which programs run.

Tiles are not counted, because the place of an expert's tiles follows from the place of its first pair. For a few tokens
both places are equal; for more, it is `place // tile + expert`. Tiles between are empty.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import Groups
from common.kernels.base.pdl import wait_for_predecessor

FEW_TOKENS, MANY_TOKENS = 16, 1024


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group_pairs_kernel(
    experts_ptr,  # [num_pairs] int32, -1 for padding
    order_ptr,  # [num_pairs] int32
    tiles_ptr,  # [3, num_tiles] int32
    num_pairs,
    num_tiles,
    num_experts,
    TILE: tl.constexpr,
    FEW: tl.constexpr,  # as many tiles as pairs
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_experts + 1,). The last program is that of padding."""
    own = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    before, equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_pairs, BLOCK, num_stages=STAGES):
        experts = tl.load(experts_ptr + start + lanes, mask=start + lanes < num_pairs, other=num_experts + 1)
        experts = tl.where(experts < 0, num_experts, experts)
        before += (experts < own).to(tl.int32)
        equal += (experts == own).to(tl.int32)
    begin, count = tl.sum(before, axis=0), tl.sum(equal, axis=0)

    if FEW:
        first, end = begin, begin + count
    else:
        first, end = begin // TILE + own, (begin + count) // TILE + own + 1
    expert = tl.where(own < num_experts, own, -1)
    for start in range(first, end, BLOCK):
        tiles = start + lanes
        first_pair = begin + (tiles - first) * TILE
        tl.store(tiles_ptr + tiles, tl.zeros_like(tiles) + expert, mask=tiles < end)
        tl.store(tiles_ptr + num_tiles + tiles, first_pair, mask=tiles < end)
        tl.store(tiles_ptr + 2 * num_tiles + tiles, tl.minimum(first_pair + TILE, begin + count), mask=tiles < end)

    place = begin
    for start in tl.range(0, tl.where(count > 0, num_pairs, 0), BLOCK, num_stages=STAGES):
        pairs = start + lanes
        experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=num_experts + 1)
        is_own = (tl.where(experts < 0, num_experts, experts) == own).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, axis=0) - 1, pairs, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)


def group_pairs(experts: Tensor, num_experts: int, tile: int, *, pdl: bool = False) -> Groups:
    """Sort the pairs of `experts [num_tokens, num_slots]` int32 by expert, and divide them into tiles of `tile`."""
    assert experts.dtype == torch.int32 and experts.is_contiguous(), "experts: contiguous int32 needed"
    num_pairs, is_few = experts.numel(), experts.shape[0] <= FEW_TOKENS
    num_tiles = num_pairs if is_few else num_pairs // tile + num_experts + 1
    block = 128 if is_few else 4096 if experts.shape[0] > MANY_TOKENS else 1024
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    _group_pairs_kernel[(num_experts + 1,)](
        experts_ptr=experts,
        order_ptr=order,
        tiles_ptr=tiles,
        num_pairs=num_pairs,
        num_tiles=num_tiles,
        num_experts=num_experts,
        TILE=tile,
        FEW=is_few,
        BLOCK=block,
        STAGES=1 if is_few else 3,
        PDL=pdl,
        num_warps=min(max(block // 256, 4), 16),
        launch_pdl=pdl,
    )
    return Groups(order, tiles)
