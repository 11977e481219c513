"""The smallest logit that passes top-k, top-p and min-p: a radix select spread over many programs.

Both filters limit the weight of likelier tokens: top-k their number, top-p their probability. Three
kernels find where the limit is reached:

    1. the largest logit of every part of a row, and so of the row;
    2. a histogram of the row over buckets of the distance to the largest logit. The last program of
       the row adds it up and finds the few buckets in which the limits are reached;
    3. the tokens of those buckets, gathered. The last program of the row halves the range of their
       values, as integers of the same order, until one is left.

Every sum is one of integers: probabilities are held in fixed point. So the result depends neither on
the order in which programs run nor on the rest of the batch. It is exact up to the rounding of
probabilities, and tokens that tie with the last one kept are kept. Rows without filters leave each
kernel as soon as its predecessor is done.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.filter_histogram import (
    BOUNDARY_FIELDS,
    NUM_BUCKETS,
    bucket_of,
    histogram_kernel,
    load_filters,
    load_scaled,
    mass_limit,
    mass_of,
    part_max_kernel,
)
from common.kernels.last_program import is_last
from common.kernels.operands import MAX_VOCAB, SamplingTensors
from common.kernels.pdl import wait_for_predecessor

CHUNK = 2048  # logits a program takes at once
PART = 512  # logits of which kernel 1 keeps the largest
MAX_PROGRAMS = 256  # of a launch, shared by the rows: what a GPU runs at once
ROOM = 8192  # gathered tokens of a row; if there are more, the row itself is read instead


@triton.jit
def _order(x):
    """fp32 as int64 of the same order, -0 as +0; int64, so that sums do not overflow."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(order):
    """The fp32 of an order."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load_tile(
    source_ptr, begin, size, divisor, first, last, top, floor, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Logits `[BLOCK]` from `begin` on: order, weight (mass, or 1), and whether they are in buckets first to last.

    Those that are not weigh 0. All int64, but for the last.
    """
    places = begin + tl.arange(0, BLOCK)
    x = load_scaled(source_ptr, places, size, divisor)
    bucket = bucket_of(x, top, floor, temperature)
    within = (places < size) & (bucket >= first) & (bucket <= last)
    weight = mass_of(x, top) if MASS else tl.full((BLOCK,), 1, tl.int64)
    return _order(x), tl.where(within, weight, 0), within


@triton.jit
def _weight_above(
    orders,  # [BLOCK], weights too: the first tile, in registers, since it is mostly all there is
    weights,
    source_ptr,
    size,
    divisor,
    threshold,
    first,
    last,
    top,
    floor,
    temperature,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of buckets first to last whose order exceeds `threshold`: their mass, or their number. int64."""
    total = tl.where(orders > threshold, weights, 0)
    for begin in tl.range(BLOCK, size, BLOCK):
        order, weight, _ = _load_tile(
            source_ptr, begin, size, divisor, first, last, top, floor, temperature, MASS, BLOCK
        )
        total += tl.where(order > threshold, weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _mass_from(source_ptr, size, divisor, threshold, first, last, top, floor, temperature, BLOCK: tl.constexpr):
    """Mass of the logits of buckets first to last whose order is `threshold` at least. int64."""
    orders, weights, _ = _load_tile(source_ptr, 0, size, divisor, first, last, top, floor, temperature, True, BLOCK)
    return _weight_above(
        orders, weights, source_ptr, size, divisor, threshold - 1, first, last, top, floor, temperature, True, BLOCK
    )


@triton.jit
def _lowest_within(
    source_ptr, size, divisor, limit, first, last, top, floor, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Smallest order of buckets first to last above which less than `limit` weighs; there is one."""
    orders, weights, within = _load_tile(
        source_ptr, 0, size, divisor, first, last, top, floor, temperature, MASS, BLOCK
    )
    lows = tl.where(within, orders, _order(tl.full((), float("inf"), tl.float32)))
    highs = tl.where(within, orders, _order(tl.full((), float("-inf"), tl.float32)))
    for begin in tl.range(BLOCK, size, BLOCK):
        order, _, is_in = _load_tile(
            source_ptr, begin, size, divisor, first, last, top, floor, temperature, MASS, BLOCK
        )
        lows = tl.where(is_in, tl.minimum(lows, order), lows)
        highs = tl.where(is_in, tl.maximum(highs, order), highs)
    low = tl.min(lows, axis=0)
    high = tl.max(highs, axis=0)
    while low < high:
        middle = (low + high) >> 1
        weight = _weight_above(
            orders, weights, source_ptr, size, divisor, middle, first, last, top, floor, temperature, MASS, BLOCK
        )
        if weight < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _refine_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    edges_ptr,  # [num_rows, 2] fp32: top and floor, scaled
    boundary_ptr,  # [num_rows, 6] int64, see _locate
    gathered_ptr,  # [num_rows, ROOM] fp32, scaled, in any order
    num_gathered_ptr,  # [num_rows] int32, 0 before and after
    arrivals_ptr,  # [num_rows] int32, 0 before and after
    threshold_ptr,  # [num_rows] fp32, of scaled logits
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, programs of a row). All gather the tokens of the boundary's buckets; the last one decides."""
    row = tl.program_id(0).to(tl.int64)
    temperature, _, top_p, min_p, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    wait_for_predecessor(PDL)
    if (by_k | by_p | by_min_p) == 0:
        return
    top = tl.load(edges_ptr + row * 2)
    floor = tl.load(edges_ptr + row * 2 + 1)
    boundary_ptr += row * BOUNDARY_FIELDS
    first = tl.load(boundary_ptr)
    last = tl.load(boundary_ptr + 1)
    k_bucket = tl.load(boundary_ptr + 2)
    row_ptr = logits_ptr + row * logits_stride
    gathered_ptr += row * ROOM

    end = tl.where(by_k | by_p, VOCAB, 0)  # min-p needs the top only
    for begin in tl.range(tl.program_id(1) * CHUNK, end, tl.num_programs(1) * CHUNK):
        tokens = begin + tl.arange(0, CHUNK)
        x = load_scaled(row_ptr, tokens, VOCAB, temperature)
        bucket = bucket_of(x, top, floor, temperature)
        within = (bucket == k_bucket) | ((bucket >= first) & (bucket <= last))
        within = ((tokens < VOCAB) & within).to(tl.int32)
        num_within = tl.sum(within, axis=0)
        if num_within > 0:
            places = tl.atomic_add(num_gathered_ptr + row, num_within, sem="relaxed") + tl.cumsum(within, axis=0) - 1
            tl.store(gathered_ptr + places, x, mask=(within > 0) & (places < ROOM))

    if is_last(arrivals_ptr + row, tl.num_programs(1)):
        size = tl.atomic_xchg(num_gathered_ptr + row, 0, sem="relaxed")
        source_ptr = row_ptr
        divisor = temperature
        if size <= ROOM:
            source_ptr = gathered_ptr
            divisor = tl.full((), 1.0, tl.float32)
        else:
            size = tl.full((), VOCAB, tl.int32)
        cut = _order(tl.full((), float("-inf"), tl.float32))
        kept = tl.load(boundary_ptr + 5)
        if by_k:
            limit = tl.load(boundary_ptr + 3)
            cut = _lowest_within(
                source_ptr, size, divisor, limit, k_bucket, k_bucket, top, floor, temperature, False, CHUNK
            )
        if by_p:
            if by_k:
                kept += _mass_from(source_ptr, size, divisor, cut, k_bucket, k_bucket, top, floor, temperature, CHUNK)
            limit = mass_limit(top_p, kept) - tl.load(boundary_ptr + 4)
            cut = _lowest_within(source_ptr, size, divisor, limit, first, last, top, floor, temperature, True, CHUNK)
        threshold = _value(cut)
        if by_min_p:
            threshold = tl.maximum(threshold, top + tl.log(min_p))
        tl.store(threshold_ptr + row, threshold)


@dataclass(frozen=True, slots=True)
class FilterWorkspace:
    """What the kernels hand to one another. Histogram and counters are 0 whenever no launch is under way."""

    part_max: Tensor  # [max_rows, num_parts] fp32
    counts: Tensor  # [max_rows, NUM_BUCKETS] int32
    masses: Tensor  # [max_rows, NUM_BUCKETS] int64
    edges: Tensor  # [max_rows, 2] fp32
    boundary: Tensor  # [max_rows, 6] int64
    gathered: Tensor  # [max_rows, ROOM] fp32
    num_gathered: Tensor  # [max_rows] int32
    histogram_arrivals: Tensor  # [max_rows] int32
    refine_arrivals: Tensor  # [max_rows] int32
    threshold: Tensor  # [max_rows] fp32, the result


def make_workspace(max_rows: int, vocab: int, device: torch.device) -> FilterWorkspace:
    """Room for `max_rows` rows of `vocab` logits."""
    assert vocab <= MAX_VOCAB, f"vocabulary of {vocab}: probabilities of {MAX_VOCAB} tokens add up within int64"
    num_buckets = NUM_BUCKETS.value

    def zeros(*columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((max_rows, *columns), dtype=dtype, device=device)

    return FilterWorkspace(
        part_max=zeros(triton.cdiv(vocab, PART)),
        counts=zeros(num_buckets, dtype=torch.int32),
        masses=zeros(num_buckets, dtype=torch.int64),
        edges=zeros(2),
        boundary=zeros(BOUNDARY_FIELDS.value, dtype=torch.int64),
        gathered=zeros(ROOM),
        num_gathered=zeros(dtype=torch.int32),
        histogram_arrivals=zeros(dtype=torch.int32),
        refine_arrivals=zeros(dtype=torch.int32),
        threshold=zeros(),
    )


def filter_threshold(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    params: SamplingTensors,
    workspace: FilterWorkspace,
    *,
    pdl: bool = False,
) -> None:
    """Leaves `reference.filter_threshold` of each row in `workspace.threshold`; -inf for rows drawn from greedily.

    The operands are checked by `sampling.sample`; `num_rows` is not 0.
    """
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, PART)
    grid = (num_rows, max(1, min(triton.cdiv(vocab, CHUNK), MAX_PROGRAMS // num_rows)))
    row = {
        "logits_ptr": logits,
        "temperature_ptr": params.temperature,
        "top_k_ptr": params.top_k,
        "top_p_ptr": params.top_p,
        "min_p_ptr": params.min_p,
        "logits_stride": logits.stride(0),
        "VOCAB": vocab,
        "CHUNK": CHUNK,
        "PDL": pdl,
        "num_warps": 8,
        "launch_pdl": pdl,
    }
    part_max_kernel[grid](
        part_max_ptr=workspace.part_max, threshold_ptr=workspace.threshold, PART=PART, NUM_PARTS=num_parts, **row
    )
    histogram_kernel[grid](
        part_max_ptr=workspace.part_max,
        counts_ptr=workspace.counts,
        masses_ptr=workspace.masses,
        arrivals_ptr=workspace.histogram_arrivals,
        edges_ptr=workspace.edges,
        boundary_ptr=workspace.boundary,
        NUM_PARTS=num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        **row,
    )
    _refine_kernel[grid](
        edges_ptr=workspace.edges,
        boundary_ptr=workspace.boundary,
        gathered_ptr=workspace.gathered,
        num_gathered_ptr=workspace.num_gathered,
        arrivals_ptr=workspace.refine_arrivals,
        threshold_ptr=workspace.threshold,
        ROOM=ROOM,
        **row,
    )
