"""Parts of a context in decode attention, and the joining of parts (Flash-Decoding, Dao et al., 2023).

The begins of parts follow from the length of the context and the window alone. Each part has a softmax of its own.
RUN_PARTS neighbours are joined first, from first to last; then these runs are joined, in order too. So the result does
not depend on the number of programs that compute the parts of a sequence. The number of programs follows from all
sequences of the batch (`decode_division`).

A sink is a score of no token: a part without values, with which the whole context begins. So sinks count once.

A program with all parts of a context joins parts on the way. Other programs store units: single parts, or whole runs if
a program has several parts. The last program to end joins the stored units.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.attention_operands import Division

LOG2_E = 1.4426950408889634
SINK_UNITS = tl.constexpr(LOG2_E)  # of scores of sinks, which are not scaled
TILE = 64  # keys multiplied at once; a part has whole tiles
PART_TILES = 2  # tiles of a part, at least: joining a part takes about as long as a tile
MAX_PARTS = 48  # parts of a context: about as many programs as a large GPU runs at once share its 8 KV heads
RUN_PARTS = 2
NO_KEYS = tl.constexpr(-1e38)  # maximum over no scores: finite, so that differences are finite


def units_at_once(num_heads: int, head_dim: int) -> int:
    """Return the units loaded at once for four joining warps: at most 64 registers of a thread, and whole runs."""
    return min(max(64 * 128 // (num_heads * head_dim), RUN_PARTS), 16)


@triton.jit
def num_tiles_of(seq_len, TILE: tl.constexpr):
    """Return the number of tiles of a context, as a number or a tensor.

    Callable from Gluon, like all jit functions of this file.
    """
    return (seq_len + TILE - 1) // TILE


@triton.jit
def first_tile_of(seq_len, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the first tile with keys seen by a context's last token, which sees WINDOW tokens, or all if 0."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // TILE
    return first


@triton.jit
def part_tiles_of(num_tiles, PART_TILES: tl.constexpr, MAX_PARTS: tl.constexpr):
    """Return the tiles of each part of the seen tiles of a context; the last part may have fewer."""
    return tl.maximum((num_tiles + MAX_PARTS - 1) // MAX_PARTS, PART_TILES)


@triton.jit
def attended(state, scores, values):
    """Fold `scores [rows, keys]` and `values [keys, dim]` into a part's softmax; return its state.

    Scores are in units of log2, and -inf for keys out of sight. The state is a sum of values, maxima and sums of
    weights.
    """
    acc, row_max, row_sum = state
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def folded(whole, part, AXIS: tl.constexpr):
    """Fold one more part into the parts joined so far.

    Both are sums of values, maxima in units of log2, and sums of weights. AXIS is the axis present in the sums of
    values only; maxima and sums of weights have only heads. Folding nothing (a maximum of NO_KEYS, sums of 0) into
    anything, or the other way round, changes no bit.
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
def begun(nothing, sinks_ptr, heads, present):
    """Begin a context with the heads' sinks, each a part without values; `nothing` if `sinks_ptr` is None."""
    whole = nothing
    if sinks_ptr is not None:
        acc, _, row_sum = nothing
        sinks = tl.load(sinks_ptr + heads, mask=present, other=0.0)
        whole = (acc, sinks * SINK_UNITS, row_sum + 1.0)
    return whole


@triton.jit
def _load_units(
    unit_ptrs, masks, first, num_units, NUM_Q: tl.constexpr, HEAD_DIM: tl.constexpr, UNITS_AT_ONCE: tl.constexpr
):
    """Load UNITS_AT_ONCE units at once; units past the last, never written, read as nothing."""
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
    whole,  # units joined before: `[heads, HEAD_DIM]`, `[heads]`, `[heads]`
    nothing,  # shaped like `whole`
    unit_ptrs,  # pointers to the first unit, shaped like `whole`
    masks,  # of heads and dimensions, of heads
    num_units,
    are_runs,  # else units are single parts
    NUM_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    RUN_PARTS: tl.constexpr,
):
    """Join all stored units of a context to `whole`."""
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
def output_of(whole, v_scale=None):
    """Return the output `[heads, HEAD_DIM]` of a context with all parts joined; masked heads and padding give zeros.

    `v_scale` is a factor of all values, or None.
    """
    acc, _, row_sum = whole
    out = acc / tl.expand_dims(tl.where(row_sum > 0, row_sum, 1.0), 1)
    if v_scale is not None:
        out = out * v_scale
    return out


@dataclass(frozen=True, slots=True)
class PartsWorkspace:
    """Memory for units to be joined; all layers share an instance, because layers run in sequence."""

    partial: Tensor  # [max_joins, MAX_PARTS, num_q_heads, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_joins, MAX_PARTS, num_q_heads] fp32: maxima of scores, in units of log2
    sums: Tensor  # [max_joins, MAX_PARTS, num_q_heads] fp32: sums of weights
    arrivals: Tensor  # [max_joins, num_kv_heads] int32, 0: programs that have stored their units

    @property
    def max_joins(self) -> int:
        return self.maxima.shape[0]


def make_workspace(
    max_joins: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> PartsWorkspace:
    """Allocate room for the parts of `max_joins` contexts (`decode_division.limits_for`)."""
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
    """Require room for the parts left by a division."""
    max_joins = division.max_joins
    assert max_joins <= workspace.max_joins, f"{max_joins} joins: the workspace has room for {workspace.max_joins}"
    shape = (*workspace.partial.shape[2:], workspace.arrivals.shape[1])
    assert shape == (num_q_heads, head_dim, num_kv_heads), f"workspace {shape}: heads differ"
