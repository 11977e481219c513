"""Choice of the token of a row with filters: the last program of `shortlist_kernel` tests the best tokens.

A token passes top-k if fewer than k tokens are likelier, and top-p if likelier tokens weigh less than p of all. A look
at the list answers both for a token, so the limits themselves need not be found. The best of all tokens is tested
first. If the best token fails, all tokens no likelier fail as well, and the best of the likelier tokens is tested next.
The tested token is a draw, so mostly more than half of the tokens is gone at each turn. With both filters on, top-p
applies to the tokens left by top-k, so top-k's limit is found first.
"""

import triton
import triton.language as tl

from common.kernels.base import sampling_operands
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
NO_CHOICE = tl.constexpr(sampling_operands.NO_CHOICE)
# Sums or maxima over the programs of a row: int64 each.
BEST_SURE = tl.constexpr(0)  # `key_of` the best token certain to pass
BEST_LISTED = tl.constexpr(1)
MASS_SURE = tl.constexpr(2)
MASS_BEYOND = tl.constexpr(3)  # of listed tokens likelier than all tokens not listed
NUM_SURE = tl.constexpr(4)
NUM_BEYOND = tl.constexpr(5)
NUM_LISTED = tl.constexpr(6)
NUM_SUMS = tl.constexpr(8)  # a power of two


@triton.jit
def take_sums(sums_ptr):
    """Load the sums of a row, in order; leave zeros for the next launch."""
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
    """Load orders and weights (mass or 1) of a tile of the list, `[BLOCK]`; entries past the list's end weigh 0."""
    places = first + tl.arange(0, BLOCK)
    x = load_logits(list_ptr, places, size)
    weights = tl.full((BLOCK,), 1, tl.int64)
    if by_mass:
        weights = mass_of(x, top, octaves_per_logit(temperature))
    return order_of(tl.div_rn(x, temperature)), tl.where(places < size, weights, 0)


@triton.jit
def _weight_above(tile, list_ptr, size, order, top, temperature, by_mass, BLOCK: tl.constexpr):
    """Return the mass or the number, int64, of listed tokens with a higher order.

    `tile` is the list's first tile, in registers, because mostly there is no other.
    """
    orders, weights = tile
    total = tl.where(orders > order, weights, 0)
    for first in tl.range(BLOCK, size, BLOCK):
        orders, weights = _load_tile(list_ptr, first, size, top, temperature, by_mass, BLOCK)
        total += tl.where(orders > order, weights, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _best_above(lists, size, order, least, temperature, BLOCK: tl.constexpr):
    """Return `key_of` the best listed token with a higher order that passes min-p; 0 if there is none."""
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
    """Return an order exceeded by the list's `wanted` likeliest tokens and ties with the last, but by no others."""
    _, highest, _, _, unlisted = reach
    tile = _load_tile(list_ptr, 0, size, top, temperature, False, BLOCK)
    low = order_of(unlisted) - 1  # below all listed orders
    high = order_of(tl.div_rn(highest, temperature))  # no listed order is above
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
    total,  # fp32: weight of all tokens, up to SLACK
    top,
    temperature,
    filters,  # top_k, top_p, by_k, by_p
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Return the token of a row, or NO_CHOICE; UNDECIDED if the list does not determine the token."""
    best, key, mass_sure, mass_beyond, num_sure, num_beyond, num_listed = sums
    list_ptr, _, _ = lists
    lowest, _, is_listed, least, unlisted = reach
    top_k, top_p, by_k, by_p = filters
    size = tl.minimum(num_listed, ROOM).to(tl.int32)
    is_whole = lowest == LOWEST  # all tokens are sure or listed
    reaches_k = is_whole | (num_sure + num_beyond >= top_k)
    # Tokens not listed fail a filter, though such a token may tie with the least listed logit.
    reaches = is_whole | (least > unlisted) | (by_k & reaches_k)
    is_clear = is_listed & (num_listed <= ROOM) & (top > -LARGEST)
    if by_k:
        is_clear &= (num_sure < top_k) & ((by_p == 0) | reaches_k)
    above = num_sure
    limit = top_k.to(tl.int64)  # a token passes if the weight above is less
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
