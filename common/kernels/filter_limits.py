"""Where exactly the limits of top-k and top-p are reached among some logits: halves the range of their orders.

Both filters limit the weight of likelier tokens: top-k their number, top-p their probability, in fixed point. Every sum
is one of integers, so it depends neither on the order of the logits nor on who adds them up.
"""

import triton
import triton.language as tl

from common.kernels.filter_values import load_logits, mass_of, order_of


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
