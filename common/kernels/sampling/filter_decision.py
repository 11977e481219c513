"""Which token a row with filters draws: the last program of `shortlist_kernel` asks the best ones whether they pass.

A token passes top-k if fewer than k are likelier, and top-p if likelier ones weigh less than p of all. Of one token one
look at the list tells that, so the limits themselves need not be found. The best of all tokens is asked first. If it
fails, so does all that is no likelier, and the best of what is likelier is asked next: as that is a draw, mostly more
than half is gone at each turn. Where both filters are on, top-p is of what top-k leaves, so that is looked for before.
"""

import triton
import triton.language as tl

from common.kernels.base import operands
from common.kernels.sampling.filter_survey import LOWEST, SLACK
from common.kernels.sampling.filter_values import (
    LARGEST,
    MASS_ONE,
    is_token,
    key_of,
    load_logits,
    mass_limit,
    mass_of,
    octaves_per_logit,
    order_of,
    token_of,
)

UNDECIDED = tl.constexpr(-3)
NO_CHOICE = tl.constexpr(operands.NO_CHOICE)
# What the programs of a row add up, or the largest of it: int64 each.
BEST_SURE = tl.constexpr(0)  # `key_of` the best token that passes for certain
BEST_LISTED = tl.constexpr(1)
MASS_SURE = tl.constexpr(2)
MASS_BEYOND = tl.constexpr(3)  # of what is listed and likelier than anything that is not
NUM_SURE = tl.constexpr(4)
NUM_BEYOND = tl.constexpr(5)
NUM_LISTED = tl.constexpr(6)
NUM_SUMS = tl.constexpr(8)  # a power of two


@triton.jit
def take_sums(sums_ptr):
    """The sums of a row, in order; zeros are left for the next launch."""
    best_sure = tl.load(sums_ptr + BEST_SURE)
    best_listed = tl.load(sums_ptr + BEST_LISTED)
    mass_sure = tl.load(sums_ptr + MASS_SURE)
    mass_beyond = tl.load(sums_ptr + MASS_BEYOND)
    num_sure = tl.load(sums_ptr + NUM_SURE)
    num_beyond = tl.load(sums_ptr + NUM_BEYOND)
    num_listed = tl.load(sums_ptr + NUM_LISTED)
    tl.debug_barrier()  # every thread has read
    tl.store(sums_ptr + tl.arange(0, NUM_SUMS), tl.zeros((NUM_SUMS,), tl.int64))
    return best_sure, best_listed, mass_sure, mass_beyond, num_sure, num_beyond, num_listed


@triton.jit
def _load_tile(list_ptr, first, size, top, temperature, by_mass, BLOCK: tl.constexpr):
    """Orders and weights, mass or 1, of a tile of the list, `[BLOCK]`; past its end nothing weighs anything."""
    places = first + tl.arange(0, BLOCK)
    x = load_logits(list_ptr, places, size)
    weights = tl.full((BLOCK,), 1, tl.int64)
    if by_mass:
        weights = mass_of(x, top, octaves_per_logit(temperature))
    return order_of(tl.div_rn(x, temperature)), tl.where(places < size, weights, 0)


@triton.jit
def _weight_above(tile, list_ptr, size, order, top, temperature, by_mass, BLOCK: tl.constexpr):
    """What is listed and has a higher order: its mass, or its number. int64.

    `tile` is the first one, in registers, since it is mostly all there is.
    """
    orders, weights = tile
    total = tl.where(orders > order, weights, 0)
    for first in tl.range(BLOCK, size, BLOCK):
        orders, weights = _load_tile(list_ptr, first, size, top, temperature, by_mass, BLOCK)
        total += tl.where(orders > order, weights, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _best_above(lists, size, order, least, temperature, BLOCK: tl.constexpr):
    """`key_of` the best token that is listed, passes min-p and has a higher order; 0 if there is none."""
    list_ptr, list_scores_ptr, list_ids_ptr = lists
    best = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        scaled = tl.div_rn(load_logits(list_ptr, places, size), temperature)
        scores = load_logits(list_scores_ptr, places, size)
        ids = tl.load(list_ids_ptr + places, mask=places < size, other=0)
        passes = (places < size) & (scaled >= least) & (order_of(scaled) > order)
        best = tl.maximum(best, tl.where(passes, key_of(scores, ids), 0))
    return tl.max(best, axis=0)


@triton.jit
def _order_below(list_ptr, size, wanted, reach, top, temperature, BLOCK: tl.constexpr):
    """An order above which are the `wanted` likeliest tokens of the list, and what ties with the last of them."""
    _, highest, _, _, unlisted = reach
    tile = _load_tile(list_ptr, 0, size, top, temperature, False, BLOCK)
    low = order_of(unlisted) - 1  # nothing is as low
    high = order_of(tl.div_rn(highest, temperature))  # nothing is above
    while low + 1 < high:
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        number = _weight_above(tile, list_ptr, size, middle, top, temperature, False, BLOCK)
        low = tl.where(number >= wanted, middle, low)
        high = tl.where(number <= wanted, middle, high)
    return low


@triton.jit
def decide(
    row_ptr,
    lists,  # of the row: list_ptr, list_scores_ptr, list_ids_ptr
    sums,  # of `take_sums`
    reach,
    total,  # fp32: weight of all tokens, but for SLACK
    top,
    temperature,
    filters,  # top_k, top_p, by_k, by_p
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The token of a row, or NO_CHOICE; UNDECIDED if that does not follow from what is listed."""
    best, key, mass_sure, mass_beyond, num_sure, num_beyond, num_listed = sums
    list_ptr, _, _ = lists
    lowest, _, is_listed, least, unlisted = reach
    top_k, top_p, by_k, by_p = filters
    size = tl.minimum(num_listed, ROOM).to(tl.int32)
    is_whole = lowest == LOWEST  # all tokens are sure or listed
    reaches_k = is_whole | (num_sure + num_beyond >= top_k)
    # Whatever is not listed fails a filter, though it may tie with the least logit that is.
    reaches = is_whole | (least > unlisted) | (by_k & reaches_k)
    is_clear = is_listed & (num_listed <= ROOM) & (top > -LARGEST)
    if by_k:
        is_clear &= (num_sure < top_k) & ((by_p == 0) | reaches_k)
    above = num_sure
    limit = top_k.to(tl.int64)  # what is above a token that passes is less
    limit_at_most = limit
    floor = order_of(tl.full((), float("-inf"), tl.float32))
    if is_clear & (by_k | by_p):
        tile = _load_tile(list_ptr, 0, size, top, temperature, by_p, BLOCK)
        if by_p:
            above = mass_sure
            least_total = (total * (MASS_ONE * (1.0 - SLACK))).to(tl.int64)
            most_total = (total * (MASS_ONE * (1.0 + SLACK))).to(tl.int64)
            if by_k:
                floor = _order_below(list_ptr, size, top_k - num_sure, reach, top, temperature, BLOCK)
                most_total = above + _weight_above(tile, list_ptr, size, floor, top, temperature, by_p, BLOCK)
                least_total = most_total
            limit = mass_limit(top_p, least_total)
            limit_at_most = mass_limit(top_p, most_total)
            reaches |= above + mass_beyond >= limit_at_most
            is_clear &= above < limit
        is_clear &= reaches
        while is_clear & (key > best):
            x = load_logits(row_ptr, token_of(key), VOCAB)
            order = order_of(tl.div_rn(x, temperature))
            weight = above + _weight_above(tile, list_ptr, size, order, top, temperature, by_p, BLOCK)
            passes = (order > floor) & (weight < limit)
            is_clear = passes | (order <= floor) | (weight >= limit_at_most)
            if passes:
                best = key
            elif is_clear:
                key = _best_above(lists, size, tl.maximum(order, floor), least, temperature, BLOCK)
    token = tl.where(is_token(best), token_of(best), NO_CHOICE)
    return tl.where(is_clear & reaches, token, UNDECIDED)
