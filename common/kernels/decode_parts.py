"""The parts of a context in decode attention, and how they are joined (Flash-Decoding, Dao et al., 2023).

Where parts begin follows from the length of the context alone, each has a softmax of its own, and they are
joined one by one from the first to the last. So it makes no difference to the result how many programs
compute the parts of a sequence, which follows from all sequences of the batch (`decode_division`): a program
that computes all of them joins them as it goes, the others store theirs for a second kernel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.operands import Division
from common.kernels.pdl import wait_for_predecessor

LOG2_E = 1.4426950408889634
TILE = 64  # keys that are multiplied at once; a part has whole tiles
MAX_PARTS = 32  # of a context; one program joins the parts of a head, all of them on their way at once
FEW_PARTS = 16  # of shorter contexts: fewer loads where nothing is
NO_KEYS = tl.constexpr(-1e38)  # maximum over no scores: finite, so that differences of two are


@triton.jit
def num_tiles_of(seq_len, TILE: tl.constexpr):
    """Tiles of a context, as a number or a tensor. For Gluon, too, as all in this file that is no kernel."""
    return (seq_len + TILE - 1) // TILE


@triton.jit
def part_tiles_of(num_tiles, MAX_PARTS: tl.constexpr):
    """Tiles of each part of a context but the last, which may have fewer."""
    return tl.maximum((num_tiles + MAX_PARTS - 1) // MAX_PARTS, 1)


@triton.jit
def fold(maximum, part_maximum):
    """The maximum of what is joined with one more part, and by how much the sums of the two are scaled."""
    joined = tl.maximum(maximum, part_maximum)
    return joined, tl.exp2(maximum - joined), tl.exp2(part_maximum - joined)


@triton.jit
def _join_kernel(
    joins_ptr,  # [max_joins, 2] int32: row and number of parts
    counts_ptr,  # [3] int32, of `Division`
    partial_ptr,  # [max_joins, MAX_PARTS, NUM_Q, HEAD_DIM] fp32
    maxima_ptr,  # [max_joins, MAX_PARTS, NUM_Q] fp32, in units of log2
    sums_ptr,  # the same shape
    out_ptr,  # [num_seqs, NUM_Q, HEAD_DIM], contiguous
    NUM_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEW_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: any number. A program joins one head after another; often there is nothing to join."""
    num_heads = tl.load(counts_ptr + 1) * NUM_Q
    index = tl.program_id(0)
    row, num_parts = _load_join(joins_ptr + index // NUM_Q * 2, index < num_heads)
    wait_for_predecessor(PDL)
    if index == 0:
        tl.store(counts_ptr + 2, 0)  # for the next layer
    while index < num_heads:
        first = (index // NUM_Q).to(tl.int64) * MAX_PARTS * NUM_Q + index % NUM_Q
        columns = (row.to(tl.int64) * NUM_Q + index % NUM_Q) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        if num_parts > FEW_PARTS:
            out = _joined(partial_ptr, maxima_ptr, sums_ptr, first, num_parts, NUM_Q, HEAD_DIM, MAX_PARTS)
            tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty))
        else:
            out = _joined(partial_ptr, maxima_ptr, sums_ptr, first, num_parts, NUM_Q, HEAD_DIM, FEW_PARTS)
            tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty))
        index += tl.num_programs(0)
        row, num_parts = _load_join(joins_ptr + index // NUM_Q * 2, index < num_heads)


@triton.jit
def _load_join(join_ptr, exists):
    return tl.load(join_ptr, mask=exists, other=0), tl.load(join_ptr + 1, mask=exists, other=0)


@triton.jit
def _joined(
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    first,
    num_parts,
    NUM_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Output of a head whose parts lie NUM_Q apart; those that do not exist were never written and are not read."""
    columns = tl.arange(0, HEAD_DIM)
    parts = ()
    for part in tl.static_range(MAX_PARTS):
        exists = part < num_parts
        index = first + part * NUM_Q
        partial = tl.load(partial_ptr + index * HEAD_DIM + columns, mask=exists, other=0.0)
        part_max = tl.load(maxima_ptr + index, mask=exists, other=NO_KEYS)
        part_sum = tl.load(sums_ptr + index, mask=exists, other=0.0)
        parts = parts + ((partial, part_max, part_sum),)  # type: ignore[assignment]
    tl.debug_barrier()  # no load is put off until what comes before it is joined
    acc = tl.zeros((HEAD_DIM,), tl.float32)
    row_max = NO_KEYS
    row_sum = 0.0
    for part in tl.static_range(MAX_PARTS):
        partial, part_max, part_sum = parts[part]
        row_max, scale, part_scale = fold(row_max, part_max)
        acc = tl.fma(acc, scale, partial * part_scale)
        row_sum = tl.fma(row_sum, scale, part_sum * part_scale)
    return acc / row_sum


@dataclass(frozen=True, slots=True)
class PartsWorkspace:
    """Where programs leave parts that a join reads; one is enough for all layers, which run one after another."""

    partial: Tensor  # [max_joins, MAX_PARTS, num_q_heads, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_joins, MAX_PARTS, num_q_heads] fp32: of scores, in units of log2
    sums: Tensor  # the same shape: of weights

    @property
    def max_joins(self) -> int:
        return self.maxima.shape[0]


def make_workspace(max_joins: int, num_q_heads: int, head_dim: int, device: torch.device) -> PartsWorkspace:
    """Room for the parts of `max_joins` contexts (`decode_division.limits_for`)."""
    shape = (max_joins, MAX_PARTS, num_q_heads)
    return PartsWorkspace(
        partial=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty(shape, dtype=torch.float32, device=device),
        sums=torch.empty(shape, dtype=torch.float32, device=device),
    )


def check_room(workspace: PartsWorkspace, division: Division, num_q_heads: int, head_dim: int) -> None:
    """Whether the parts that a division leaves fit."""
    max_joins = division.joins.shape[0]
    assert max_joins <= workspace.max_joins, f"{max_joins} joins: the workspace has room for {workspace.max_joins}"
    shape = tuple(workspace.partial.shape[2:])
    assert shape == (num_q_heads, head_dim), f"workspace {shape}: heads differ"


def join_parts_of_contexts(out: Tensor, division: Division, workspace: PartsWorkspace, *, pdl: bool) -> None:
    """Write the rows of `out [num_seqs, num_q_heads, head_dim]`, contiguous, whose parts several programs computed."""
    num_q, head_dim = out.shape[1:]
    _join_kernel[(min(division.joins.shape[0] * num_q, 2 * division.num_slots),)](
        joins_ptr=division.joins,
        counts_ptr=division.counts,
        partial_ptr=workspace.partial,
        maxima_ptr=workspace.maxima,
        sums_ptr=workspace.sums,
        out_ptr=out,
        NUM_Q=num_q,
        HEAD_DIM=head_dim,
        FEW_PARTS=FEW_PARTS,
        MAX_PARTS=MAX_PARTS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
