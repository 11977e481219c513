"""Exact limits of a row whose token is undecided: the last kernel of `filtered_draw`.

Halves the range of orders that contains a limit, until few enough logits are left in the range for registers.

Both filters limit the weight of likelier tokens: top-k their number, top-p their probability, in fixed point. Every sum
is a sum of integers, so neither the order of the logits nor the division over programs matters.
"""

import triton
import triton.language as tl

from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.sampling.filter_decision import UNDECIDED
from common.kernels.sampling.filter_values import (
    LARGEST,
    load_filters,
    load_logits,
    mass_limit,
    mass_of,
    octaves_per_logit,
    order_of,
    value_of,
)

TURNS_BY_VALUE = tl.constexpr(10)  # first turns halve distances (orders crowd near 0), later turns orders, always few


@triton.jit
def _load_tile(source_ptr, begin, size, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Load logits `[BLOCK]` from `begin` on: orders, weights (mass, or 1; int64), and whether each is present.

    Absent logits weigh 0.
    """
    places = begin + tl.arange(0, BLOCK)
    x = load_logits(source_ptr, places, size)
    weights = mass_of(x, top, octaves_per_logit(temperature)) if MASS else tl.full((BLOCK,), 1, tl.int64)
    return order_of(tl.div_rn(x, temperature)), tl.where(places < size, weights, 0), places < size


@triton.jit
def _weight_above(
    orders,  # [BLOCK], weights too: the first tile, in registers, because mostly there is no other
    weights,
    source_ptr,
    size,
    threshold,
    top,
    temperature,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the mass or the number, int64, of logits whose order exceeds `threshold`."""
    total = tl.where(orders > threshold, weights, 0)
    for begin in tl.range(BLOCK, size, BLOCK):
        order, weight, _ = _load_tile(source_ptr, begin, size, top, temperature, MASS, BLOCK)
        total += tl.where(order > threshold, weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _mass_from(source_ptr, size, threshold, top, temperature, BLOCK: tl.constexpr):
    """Return the mass, int64, of logits whose order is at least `threshold`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in tl.range(0, size, BLOCK):
        orders, weights, _ = _load_tile(source_ptr, begin, size, top, temperature, True, BLOCK)
        total += tl.where(orders >= threshold, weights, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _lowest_within(source_ptr, size, limit, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest order above which less than `limit`, positive, weighs; without logits, the order of -inf."""
    orders, weights, present = _load_tile(source_ptr, 0, size, top, temperature, MASS, BLOCK)
    lows = tl.where(present, orders, order_of(tl.full((), float("inf"), tl.float32)))
    highs = tl.where(present, orders, order_of(tl.full((), float("-inf"), tl.float32)))
    for begin in tl.range(BLOCK, size, BLOCK):
        order, _, is_in = _load_tile(source_ptr, begin, size, top, temperature, MASS, BLOCK)
        lows = tl.where(is_in, tl.minimum(lows, order), lows)
        highs = tl.where(is_in, tl.maximum(highs, order), highs)
    low = tl.min(lows, axis=0)
    high = tl.max(highs, axis=0)
    while low < high:
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        weight = _weight_above(orders, weights, source_ptr, size, middle, top, temperature, MASS, BLOCK)
        if weight < limit:
            high = middle
        else:
            low = middle + 1
    return tl.minimum(low, high)


@triton.jit
def _survey_ends(source_ptr, size, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return lowest and highest order of the logits above -inf, their weight, int64, and their number, int32."""
    lows = order_of(tl.full((BLOCK,), float("inf"), tl.float32))
    highs = order_of(tl.full((BLOCK,), float("-inf"), tl.float32))
    lowest = order_of(tl.full((), float("-inf"), tl.float32))
    total = tl.zeros((BLOCK,), tl.int64)
    number = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(0, size, BLOCK):
        orders, weights, present = _load_tile(source_ptr, begin, size, top, temperature, MASS, BLOCK)
        is_finite = present & (orders > lowest)
        lows = tl.where(is_finite, tl.minimum(lows, orders), lows)
        highs = tl.where(is_finite, tl.maximum(highs, orders), highs)
        total += tl.where(is_finite, weights, 0)
        number += is_finite.to(tl.int32)
    return tl.min(lows, axis=0), tl.max(highs, axis=0), tl.sum(total, axis=0), tl.sum(number, axis=0)


@triton.jit
def _beyond(source_ptr, size, threshold, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weight, int64, and the number, int32, of logits whose order exceeds `threshold`."""
    total = tl.zeros((BLOCK,), tl.int64)
    number = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(0, size, BLOCK):
        orders, weights, present = _load_tile(source_ptr, begin, size, top, temperature, MASS, BLOCK)
        is_beyond = present & (orders > threshold)
        total += tl.where(is_beyond, weights, 0)
        number += is_beyond.to(tl.int32)
    return tl.sum(total, axis=0), tl.sum(number, axis=0)


@triton.jit
def _put_together(source_ptr, size, few_ptr, low, high, temperature, BLOCK: tl.constexpr):
    """Store the logits with orders from `low` to `high` at `few_ptr`, in source order; return their number."""
    number = tl.full((), 0, tl.int32)
    for begin in tl.range(0, size, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        x = load_logits(source_ptr, places, size)
        orders = order_of(tl.div_rn(x, temperature))
        is_between = (places < size) & (orders >= low) & (orders <= high)
        between = is_between.to(tl.int32)
        tl.store(few_ptr + number + tl.cumsum(between, axis=0) - 1, x, mask=is_between)
        number += tl.sum(between, axis=0)
    tl.debug_barrier()  # a thread loads values stored by other threads
    return number


@triton.jit
def _lowest_of_many(
    source_ptr,
    size,
    few_ptr,  # [BLOCK] fp32, written
    limit,
    top,
    temperature,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return `_lowest_within` for a source so large that each pass takes long."""
    low, high, weight, num_from_low = _survey_ends(source_ptr, size, top, temperature, MASS, BLOCK)
    if weight < limit:  # -inf passes, too
        high = order_of(tl.full((), float("-inf"), tl.float32))
        low = high
    above = tl.full((), 0, tl.int64)
    num_above = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (low < high) & (num_from_low - num_above > BLOCK):
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        if turn < TURNS_BY_VALUE:
            middle = order_of(value_of(low) * 0.5 + value_of(high) * 0.5)
            middle = tl.minimum(tl.maximum(middle, low), high - 1)
        weight, number = _beyond(source_ptr, size, middle, top, temperature, MASS, BLOCK)
        if weight < limit:
            high = middle
            above = weight
            num_above = number
        else:
            low = middle + 1
            num_from_low = number
        turn += 1
    if low < high:
        number = _put_together(source_ptr, size, few_ptr, low, high, temperature, BLOCK)
        low = _lowest_within(few_ptr, number, limit - above, top, temperature, MASS, BLOCK)
    return low


@triton.jit
def limits_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    top_ptr,  # [num_rows] fp32
    decided_ptr,  # [num_rows] int32
    few_ptr,  # [num_rows, ROOM] fp32, written; ROOM is at least BLOCK, or all tokens
    threshold_ptr,  # [num_rows] fp32: for undecided rows, the smallest scaled logit that passes all filters
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    wait_for_predecessor(PDL)
    if (by_k | by_p | by_min_p) == 0:
        return
    if tl.load(decided_ptr + row) != UNDECIDED:
        return
    top = tl.load(top_ptr + row)
    row_ptr = logits_ptr + row * logits_stride
    few_ptr += row * ROOM
    threshold = tl.full((), float("-inf"), tl.float32)
    if top > -LARGEST:  # there is a choice
        cut = order_of(threshold)
        if by_k:
            cut = _lowest_of_many(row_ptr, VOCAB, few_ptr, top_k.to(tl.int64), top, temperature, False, BLOCK)
        if by_p:
            limit = mass_limit(top_p, _mass_from(row_ptr, VOCAB, cut, top, temperature, BLOCK))
            cut = tl.maximum(cut, _lowest_of_many(row_ptr, VOCAB, few_ptr, limit, top, temperature, True, BLOCK))
        threshold = value_of(cut)
        if by_min_p:
            threshold = tl.maximum(threshold, tl.div_rn(top, temperature) + tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)
