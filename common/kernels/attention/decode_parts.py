"""The parts of a context in decode attention, and how they are joined (Flash-Decoding, Dao et al., 2023).

Where parts begin follows from the length of the context alone, and each has a softmax of its own. RUN_PARTS in a
row are joined first, from the first to the last, and these runs then, in order too. So it makes no difference to
the result how many programs compute the parts of a sequence, which follows from all sequences of the batch
(`decode_division`): a program that computes all of them joins them as it goes; the others store theirs, whole runs
if they have several, and the last one to end joins what they stored.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.operands import Division

LOG2_E = 1.4426950408889634
TILE = 64  # keys that are multiplied at once; a part has whole tiles
PART_TILES = 2  # of a part, at least: to join a part with the others takes about as long as a tile
MAX_PARTS = 48  # of a context: about as many programs as a large GPU runs at once share its 8 KV heads
RUN_PARTS = 2
NO_KEYS = tl.constexpr(-1e38)  # maximum over no scores: finite, so that differences of two are


def units_at_once(num_heads: int, head_dim: int) -> int:
    """Units on their way to the four warps that join them: what 64 registers of a thread hold, and whole runs."""
    return min(max(64 * 128 // (num_heads * head_dim), RUN_PARTS), 16)


@triton.jit
def num_tiles_of(seq_len, TILE: tl.constexpr):
    """Tiles of a context, as a number or a tensor. For Gluon, too, as all in this file."""
    return (seq_len + TILE - 1) // TILE


@triton.jit
def part_tiles_of(num_tiles, PART_TILES: tl.constexpr, MAX_PARTS: tl.constexpr):
    """Tiles of each part of a context but the last, which may have fewer."""
    return tl.maximum((num_tiles + MAX_PARTS - 1) // MAX_PARTS, PART_TILES)


@triton.jit
def folded(whole, part, AXIS: tl.constexpr):
    """What is joined so far, and one part more: sums of values, maxima in units of log2 and sums of weights.

    AXIS is the one of the sums of values that the two others, which have only heads, do not have. To fold
    nothing, with a maximum of NO_KEYS and sums of 0, into anything or the other way round changes no bit.
    """
    acc, row_max, row_sum = whole
    part_acc, part_max, part_sum = part
    joined = tl.maximum(row_max, part_max)
    scale = tl.exp2(row_max - joined)
    part_scale = tl.exp2(part_max - joined)
    scales, acc = tl.broadcast(tl.expand_dims(scale, AXIS), acc)
    acc = tl.fma(acc, scales, part_acc * tl.expand_dims(part_scale, AXIS))
    return acc, joined, tl.fma(row_sum, scale, part_sum * part_scale)


@triton.jit
def _load_units(
    unit_ptrs, masks, first, num_units, NUM_Q: tl.constexpr, HEAD_DIM: tl.constexpr, UNITS_AT_ONCE: tl.constexpr
):
    """As many units as are on their way at once; those past the last, which were never written, are nothing."""
    partial_ptrs, maxima_ptrs, sums_ptrs = unit_ptrs
    present, present_heads = masks
    units = ()
    for i in tl.static_range(UNITS_AT_ONCE):
        exists = first + i < num_units
        heads_before = (first + i) * NUM_Q
        partial = tl.load(partial_ptrs + heads_before * HEAD_DIM, mask=present & exists, other=0.0)
        maxima = tl.load(maxima_ptrs + heads_before, mask=present_heads & exists, other=NO_KEYS)
        sums = tl.load(sums_ptrs + heads_before, mask=present_heads & exists, other=0.0)
        units = units + ((partial, maxima, sums),)  # type: ignore[assignment]
    return units


@triton.jit
def joined_units(
    whole,  # what comes before: `[heads, HEAD_DIM]`, `[heads]` twice
    nothing,  # shaped as these
    unit_ptrs,  # of the first unit, shaped as these
    masks,  # of heads and dimensions, of heads
    num_units,
    are_runs,  # else units are single parts
    NUM_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    RUN_PARTS: tl.constexpr,
):
    """All units of a context, which have been stored, joined to `whole`."""
    if are_runs:
        for first in range(0, num_units, UNITS_AT_ONCE):
            units = _load_units(unit_ptrs, masks, first, num_units, NUM_Q, HEAD_DIM, UNITS_AT_ONCE)
            for i in tl.static_range(UNITS_AT_ONCE):
                whole = folded(whole, units[i], 1)
    else:
        for first in range(0, num_units, UNITS_AT_ONCE):
            units = _load_units(unit_ptrs, masks, first, num_units, NUM_Q, HEAD_DIM, UNITS_AT_ONCE)
            for run in tl.static_range(UNITS_AT_ONCE // RUN_PARTS):
                joined = nothing
                for i in tl.static_range(RUN_PARTS):
                    joined = folded(joined, units[run * RUN_PARTS + i], 1)
                whole = folded(whole, joined, 1)
    return whole


@triton.jit
def output_of(whole):
    """Of a context of which all parts are joined, `[heads, HEAD_DIM]`; of heads that are masked, and padding, zeros."""
    acc, _, row_sum = whole
    return acc / tl.expand_dims(tl.where(row_sum > 0, row_sum, 1.0), 1)


@dataclass(frozen=True, slots=True)
class PartsWorkspace:
    """Where programs leave what is to be joined; one is enough for all layers, which run one after another."""

    partial: Tensor  # [max_joins, MAX_PARTS, num_q_heads, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_joins, MAX_PARTS, num_q_heads] fp32: of scores, in units of log2
    sums: Tensor  # the same shape: of weights
    arrivals: Tensor  # [max_joins, num_kv_heads] int32, 0: programs that have stored theirs

    @property
    def max_joins(self) -> int:
        return self.maxima.shape[0]


def make_workspace(
    max_joins: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> PartsWorkspace:
    """Room for the parts of `max_joins` contexts (`decode_division.limits_for`)."""
    shape = (max_joins, MAX_PARTS, num_q_heads)
    return PartsWorkspace(
        partial=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty(shape, dtype=torch.float32, device=device),
        sums=torch.empty(shape, dtype=torch.float32, device=device),
        arrivals=torch.zeros((max_joins, num_kv_heads), dtype=torch.int32, device=device),
    )


def check_room(
    workspace: PartsWorkspace, division: Division, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Whether the parts that a division leaves fit."""
    max_joins = division.max_joins
    assert max_joins <= workspace.max_joins, f"{max_joins} joins: the workspace has room for {workspace.max_joins}"
    shape = (*workspace.partial.shape[2:], workspace.arrivals.shape[1])
    assert shape == (num_q_heads, head_dim, num_kv_heads), f"workspace {shape}: heads differ"
