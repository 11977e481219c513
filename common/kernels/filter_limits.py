"""Where exactly the limits of top-k and top-p are reached among some logits: halves the range of their orders.

Among few logits all the time in registers; among many until few are left in question, which it puts together.

Both filters limit the weight of likelier tokens: top-k their number, top-p their probability, in fixed point. Every sum
is one of integers, so it depends neither on the order of the logits nor on who adds them up.
"""

import triton
import triton.language as tl

from common.kernels.filter_values import load_logits, mass_of, order_of, value_of

TURNS_BY_VALUE = tl.constexpr(10)  # halving distances; orders are as many to 0 as from there on, and always few enough


@triton.jit
def _load_tile(source_ptr, begin, size, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Logits `[BLOCK]` from `begin` on: orders, weights (mass, or 1; int64), and whether they are present.

    Those that are not weigh nothing.
    """
    places = begin + tl.arange(0, BLOCK)
    x = load_logits(source_ptr, places, size)
    weights = mass_of(x, top, temperature) if MASS else tl.full((BLOCK,), 1, tl.int64)
    return order_of(tl.div_rn(x, temperature)), tl.where(places < size, weights, 0), places < size


@triton.jit
def _weight_above(
    orders,  # [BLOCK], weights too: the first tile, in registers, since it is mostly all there is
    weights,
    source_ptr,
    size,
    threshold,
    top,
    temperature,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits whose order exceeds `threshold`: their mass, or their number. int64."""
    total = tl.where(orders > threshold, weights, 0)
    for begin in tl.range(BLOCK, size, BLOCK):
        order, weight, _ = _load_tile(source_ptr, begin, size, top, temperature, MASS, BLOCK)
        total += tl.where(order > threshold, weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def mass_from(source_ptr, size, threshold, top, temperature, BLOCK: tl.constexpr):
    """Mass of the logits whose order is `threshold` at least. int64."""
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in tl.range(0, size, BLOCK):
        orders, weights, _ = _load_tile(source_ptr, begin, size, top, temperature, True, BLOCK)
        total += tl.where(orders >= threshold, weights, 0)
    return tl.sum(total, axis=0)


@triton.jit
def lowest_within(source_ptr, size, limit, top, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Smallest order above which less than `limit` weighs. `limit` is positive; without logits it is -inf's."""
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
    """Lowest and highest order of the logits that are not -inf, their weight, int64, and their number, int32."""
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
    """Logits whose order exceeds `threshold`: their weight, int64, and their number, int32."""
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
    """Stores the logits with orders from `low` to `high` at `few_ptr`, in their order; their number."""
    number = tl.full((), 0, tl.int32)
    for begin in tl.range(0, size, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        x = load_logits(source_ptr, places, size)
        orders = order_of(tl.div_rn(x, temperature))
        is_between = (places < size) & (orders >= low) & (orders <= high)
        between = is_between.to(tl.int32)
        tl.store(few_ptr + number + tl.cumsum(between, axis=0) - 1, x, mask=is_between)
        number += tl.sum(between, axis=0)
    tl.debug_barrier()  # what one thread has stored another one loads
    return number


@triton.jit
def lowest_of_many(
    source_ptr,
    size,
    few_ptr,  # [BLOCK] fp32, written
    limit,
    top,
    temperature,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`lowest_within` of a source so large that each look at it takes long."""
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
        low = lowest_within(few_ptr, number, limit - above, top, temperature, MASS, BLOCK)
    return low
