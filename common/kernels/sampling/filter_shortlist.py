"""Shortlist of tokens that may pass: given noise, then drawn from or listed; the second kernel of `filtered_draw`.

The last program of a row decides.
"""

import triton
import triton.language as tl

from common.kernels.base.last_program import is_last
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.sampling.filter_decision import (
    BEST_LISTED,
    BEST_SURE,
    MASS_BEYOND,
    MASS_SURE,
    NUM_BEYOND,
    NUM_LISTED,
    NUM_SUMS,
    NUM_SURE,
    decide,
    take_sums,
)
from common.kernels.sampling.filter_survey import PLAN_FIELDS, load_reach
from common.kernels.sampling.filter_values import key_of, load_filters, load_logits, mass_of, octaves_per_logit
from common.kernels.sampling.gumbel import gumbel

ONE = tl.constexpr(1 << 16)  # count of 1 in a word, above the bits that name places
BITS = tl.constexpr((1 << 16) - 1)


@triton.jit
def _by_threads(values, THREADS: tl.constexpr):
    """Return sums `[THREADS]` of `values`; each thread has groups of four neighbours, so no value crosses threads."""
    GROUPS: tl.constexpr = values.shape[0] // (4 * THREADS)
    return tl.sum(tl.sum(tl.reshape(values, (GROUPS, THREADS, 4)), axis=2), axis=0)


@triton.jit
def _compact(shortlist_ptr, room, numbers, first, x, reach, TILE: tl.constexpr, THREADS: tl.constexpr):
    """Store the places from `first` on that may pass, in any order, behind `numbers` places; return new numbers.

    Places of sure tokens go to the begin of the shortlist, places of uncertain tokens to the end. A thread's own words
    name the thread's tokens, so threads need to settle only the places of their stores.
    """
    lowest, highest, _, _, _ = reach
    num_sure, num_listed = numbers
    places = tl.arange(0, TILE)
    bits = (1 << (places // (4 * THREADS) * 4 + places % 4)) + ONE
    sure = _by_threads(tl.where(x > highest, bits, 0), THREADS)
    listed = _by_threads(tl.where(x >= lowest, bits, 0), THREADS) - sure
    counts = (sure >> 16) + (listed & ~BITS)  # of both, in a single word
    total = tl.sum(counts, axis=0)
    if total > 0:
        before = tl.cumsum(counts, axis=0) - counts
        begins = num_sure + (before & BITS)
        ends = room - 1 - num_listed - (before >> 16) + (sure >> 16)
        threads = first + tl.arange(0, THREADS) * 4
        rest = (sure & BITS) + (listed << 16)
        for i in tl.range(0, tl.max((counts & BITS) + (counts >> 16), axis=0)):
            lowest_bit = rest & -rest
            bit = (lowest_bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127
            place = threads + (bit & 12) * THREADS + (bit & 3)
            entry = tl.where(bit < 16, begins + i, ends - i)
            tl.store(shortlist_ptr + entry, place.to(tl.int16), mask=rest != 0)
            rest ^= lowest_bit
    return num_sure + (total & BITS), num_listed + (total >> 16)


@triton.jit
def _shortlist(
    row_ptr,
    shortlist_ptr,  # written, int16
    upcoming,  # [TILE]: the first logits
    begin,
    end,  # a multiple of TILE further
    reach,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Return the number of tokens certain to pass, and the number of uncertain tokens."""
    room = tl.minimum(end, VOCAB) - begin
    numbers = (tl.full((), 0, tl.int32), tl.full((), 0, tl.int32))
    for first in tl.range(begin, end, TILE):
        x = upcoming
        coming = first + TILE + tl.arange(0, TILE)
        upcoming = tl.load(row_ptr + coming, mask=coming < tl.where(first + TILE < end, VOCAB, 0), other=float("nan"))
        numbers = _compact(shortlist_ptr, room, numbers, first - begin, x, reach, TILE, THREADS)
    tl.debug_barrier()  # a thread loads values stored by other threads
    return numbers


@triton.jit
def _better(best, scores, ids, among):
    """Return scores and ids, replaced by better scores where `among`."""
    best_scores, best_ids = best
    is_better = among & ((scores > best_scores) | ((scores == best_scores) & (ids < best_ids)))
    return tl.where(is_better, scores, best_scores), tl.where(is_better, ids, best_ids)


@triton.jit
def _best_key(best):
    """Return `key_of` the best of all; 0 if there is none."""
    scores, ids = best
    return tl.max(tl.where(scores > float("-inf"), key_of(scores, ids), 0), axis=0)


@triton.jit
def _draw_or_list(
    row_ptr,
    shortlist_ptr,
    begin,
    room,
    numbers,  # of this program
    lists,  # of the row: list_ptr, list_scores_ptr, list_ids_ptr
    sums_ptr,  # of the row
    noise_key,  # seed, position
    reach,
    top,
    temperature,
    by_p,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Add the best of the tokens certain to pass, and their mass, to the row's sums; list the uncertain tokens."""
    list_ptr, list_scores_ptr, list_ids_ptr = lists
    num_sure, num_listed = numbers
    seed, position = noise_key
    _, _, _, least, unlisted = reach
    octaves = octaves_per_logit(temperature)
    nothing = (tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32))
    best_sure = nothing
    best_listed = nothing
    mass_sure = tl.zeros((BLOCK,), tl.int64)
    mass_beyond = tl.zeros((BLOCK,), tl.int64)
    num_beyond = tl.zeros((BLOCK,), tl.int32)
    first_place = tl.full((), 0, tl.int32)
    if num_listed > 0:
        first_place = tl.atomic_add(sums_ptr + NUM_LISTED, num_listed.to(tl.int64), sem="relaxed").to(tl.int32)
    for first in tl.range(0, num_sure + num_listed, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        is_sure = entries < num_sure
        is_listed = (entries >= num_sure) & (entries < num_sure + num_listed)
        entries = tl.where(is_sure, entries, room - 1 + num_sure - entries)
        ids = begin + (tl.load(shortlist_ptr + entries, mask=is_sure | is_listed, other=0).to(tl.int32) & 0xFFFF)
        x = load_logits(row_ptr, ids, VOCAB)
        scaled = tl.div_rn(x, temperature)
        scores = scaled + gumbel(seed, position, ids)
        best_sure = _better(best_sure, scores, ids, is_sure & (scaled >= least))
        best_listed = _better(best_listed, scores, ids, is_listed & (scaled >= least))
        is_beyond = is_listed & (scaled > unlisted)
        num_beyond += is_beyond.to(tl.int32)
        if by_p:
            weights = mass_of(x, top, octaves)
            mass_sure += tl.where(is_sure, weights, 0)
            mass_beyond += tl.where(is_beyond, weights, 0)
        places = first_place - num_sure + first + tl.arange(0, BLOCK)
        has_room = is_listed & (places < ROOM)
        tl.store(list_ptr + places, x, mask=has_room)
        tl.store(list_scores_ptr + places, scores, mask=has_room)
        tl.store(list_ids_ptr + places, ids, mask=has_room)
    if num_sure > 0:
        tl.atomic_max(sums_ptr + BEST_SURE, _best_key(best_sure), sem="relaxed")
        tl.atomic_add(sums_ptr + NUM_SURE, num_sure.to(tl.int64), sem="relaxed")
        if by_p:
            tl.atomic_add(sums_ptr + MASS_SURE, tl.sum(mass_sure, axis=0), sem="relaxed")
    if num_listed > 0:
        tl.atomic_max(sums_ptr + BEST_LISTED, _best_key(best_listed), sem="relaxed")
        tl.atomic_add(sums_ptr + NUM_BEYOND, tl.sum(num_beyond, axis=0).to(tl.int64), sem="relaxed")
        if by_p:
            tl.atomic_add(sums_ptr + MASS_BEYOND, tl.sum(mass_beyond, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["tiles_a_chunk", "num_chunks"])
def shortlist_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    seed_ptr,  # [num_rows] int64
    next_positions_ptr,  # [num_rows] int32: of the token to be chosen
    top_ptr,  # [num_rows] fp32
    total_ptr,  # [num_rows] fp32
    plan_ptr,  # [num_rows, PLAN_FIELDS] fp32
    shortlist_ptr,  # [num_rows, VOCAB] int16: places in a chunk of tokens that may pass
    list_ptr,  # [num_rows, ROOM] fp32: logits in any order
    list_scores_ptr,  # [num_rows, ROOM] fp32: in the order of list_ptr
    list_ids_ptr,  # [num_rows, ROOM] int32: in the order of list_ptr
    sums_ptr,  # [num_rows, NUM_SUMS] int64, 0 before and after
    arrivals_ptr,  # [num_rows] int32, 0 before and after
    decided_ptr,  # [num_rows] int32: the token, NO_CHOICE, or UNDECIDED
    logits_stride,
    tiles_a_chunk,
    num_chunks,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens given noise at once
    DECISION_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, num_chunks). Logits are loaded before the wait, because the kernel before writes no logits."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature, top_k, top_p, min_p, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    noise_key = (tl.load(seed_ptr + row), tl.load(next_positions_ptr + row))
    is_filtered = by_k | by_p | by_min_p
    row_ptr = logits_ptr + row * logits_stride
    begin = chunk * tiles_a_chunk * TILE
    tokens = begin + tl.arange(0, TILE)
    x = tl.load(row_ptr + tokens, mask=tokens < tl.where(is_filtered, VOCAB, 0), other=float("nan"))
    wait_for_predecessor(PDL)
    if is_filtered == 0:
        return
    top = tl.load(top_ptr + row)
    reach = load_reach(plan_ptr + row * PLAN_FIELDS, top, temperature, min_p, by_k | by_p, by_min_p)
    lists = (list_ptr + row * ROOM, list_scores_ptr + row * ROOM, list_ids_ptr + row * ROOM)
    shortlist_ptr += row * VOCAB + begin
    sums_ptr += row * NUM_SUMS
    end = begin + tiles_a_chunk * TILE
    numbers = _shortlist(row_ptr, shortlist_ptr, x, begin, end, reach, VOCAB, TILE, THREADS)
    num_sure, num_listed = numbers
    if num_sure + num_listed > 0:
        _draw_or_list(
            row_ptr, shortlist_ptr, begin, tl.minimum(end, VOCAB) - begin, numbers, lists, sums_ptr, noise_key, reach,
            top, temperature, by_p, VOCAB, BLOCK, ROOM,
        )  # fmt: skip
    if is_last(arrivals_ptr + row, num_chunks):
        total = tl.load(total_ptr + row)
        filters = (top_k, top_p, by_k, by_p)
        token = decide(
            row_ptr, lists, take_sums(sums_ptr), reach, total, top, temperature, filters, VOCAB, DECISION_BLOCK, ROOM
        )
        tl.store(decided_ptr + row, token)
