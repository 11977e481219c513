"""Tokens that may pass are put together, given their noise, and drawn from or listed: the second of `filtered_draw`."""

import triton
import triton.language as tl

from common.kernels.filter_bins import NUM_BINS, bin_of, bins_per_logit
from common.kernels.filter_survey import PLAN_FIELDS, load_reach
from common.kernels.filter_values import best_of, load_filters, load_logits, mass_of
from common.kernels.gumbel import gumbel
from common.kernels.pdl import wait_for_predecessor

ONE_WITHIN = tl.constexpr(1 << 16)


@triton.jit
def _by_threads(values, THREADS: tl.constexpr):
    """Sums `[THREADS]` of `values`: each thread has groups of four neighbours, so nothing goes from one to another."""
    GROUPS: tl.constexpr = values.shape[0] // (4 * THREADS)
    return tl.sum(tl.sum(tl.reshape(values, (GROUPS, THREADS, 4)), axis=2), axis=0)


@triton.jit
def _compact(shortlist_ptr, number, first, is_within, TILE: tl.constexpr, THREADS: tl.constexpr):
    """Stores which places from `first` on are within, in any order, behind `number` that are there; their number then.

    A word of a thread's own says which of its tokens are within, so only where the words begin is to be settled between
    threads.
    """
    places = tl.arange(0, TILE)
    bits = 1 << (places // (4 * THREADS) * 4 + places % 4)
    words = _by_threads(tl.where(is_within, bits + ONE_WITHIN, 0), THREADS)
    counts = words >> 16
    total = tl.sum(counts, axis=0)
    if total > 0:
        entries = number + tl.cumsum(counts, axis=0) - counts
        threads = first + tl.arange(0, THREADS) * 4
        rest = words & 0xFFFF
        for i in tl.range(0, tl.max(counts, axis=0)):
            lowest = rest & -rest
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            place = threads + (bit >> 2) * (4 * THREADS) + (bit & 3)
            tl.store(shortlist_ptr + entries + i, place.to(tl.int16), mask=rest != 0)
            rest ^= lowest
    return number + total


@triton.jit
def _shortlist(
    row_ptr,
    shortlist_ptr,  # written, int16
    upcoming,  # [TILE]: the first logits
    begin,
    end,  # a multiple of TILE further
    reach,
    top,
    temperature,
    is_weighed,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Number of tokens that may pass, how many of them are in question, and the mass of all, if it is weighed."""
    lowest, highest, _, _ = reach
    number = tl.full((), 0, tl.int32)
    questions = tl.zeros((THREADS,), tl.int32)
    masses = tl.zeros((THREADS,), tl.int64)
    for first in tl.range(begin, end, TILE):
        x = upcoming
        coming = first + TILE + tl.arange(0, TILE)
        upcoming = tl.load(row_ptr + coming, mask=coming < tl.where(first + TILE < end, VOCAB, 0), other=float("nan"))
        if is_weighed:
            masses += _by_threads(mass_of(tl.where(x == x, x, float("-inf")), top, temperature), THREADS)
        is_within = x >= lowest  # not NaN
        questions += _by_threads((is_within & ((x > highest) == 0)).to(tl.int32), THREADS)
        number = _compact(shortlist_ptr, number, first - begin, is_within, TILE, THREADS)
    tl.debug_barrier()  # what one thread has stored another one loads
    return number, tl.sum(questions, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _draw_or_list(
    row_ptr,
    shortlist_ptr,
    begin,
    number,
    num_listed,  # of this program
    lists,  # of the row: list_ptr, list_scores_ptr, list_ids_ptr, num_listed_ptr, bin_counts_ptr, bin_masses_ptr
    noise_key,  # seed, position
    reach,
    top,
    temperature,
    by_k,
    by_p,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Best score of the tokens that pass for certain, its lowest id, and their mass. The others are listed."""
    list_ptr, list_scores_ptr, list_ids_ptr, num_listed_ptr, bin_counts_ptr, bin_masses_ptr = lists
    seed, position = noise_key
    lowest, highest, _, least = reach
    per_logit = bins_per_logit(lowest, highest, temperature)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.int64)
    first_place = tl.full((), 0, tl.int32)
    if num_listed > 0:
        first_place = tl.atomic_add(num_listed_ptr, num_listed, sem="relaxed")
    for first in tl.range(0, number, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        present = entries < number
        ids = begin + (tl.load(shortlist_ptr + entries, mask=present, other=0).to(tl.int32) & 0xFFFF)
        x = load_logits(row_ptr, ids, VOCAB)
        scaled = tl.div_rn(x, temperature)
        scores = scaled + gumbel(seed, position, ids)
        is_sure = present & (x > highest)
        is_better = is_sure & (scaled >= least) & ((scores > best) | ((scores == best) & (ids < best_ids)))
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, ids, best_ids)
        weights = mass_of(x, top, temperature)
        mass += tl.where(is_sure, weights, 0)
        if num_listed > 0:
            is_listed = present & (is_sure == 0)
            listed = is_listed.to(tl.int32)
            places = first_place + tl.cumsum(listed, axis=0) - 1
            first_place += tl.sum(listed, axis=0)
            has_room = is_listed & (places < ROOM)
            tl.store(list_ptr + places, x, mask=has_room)
            tl.store(list_scores_ptr + places, scores, mask=has_room)
            tl.store(list_ids_ptr + places, ids, mask=has_room)
            bins = bin_of(x, highest, per_logit)
            if by_k:
                tl.atomic_add(bin_counts_ptr + bins, listed, mask=is_listed, sem="relaxed")
            if by_p:
                tl.atomic_add(bin_masses_ptr + bins, weights, mask=is_listed, sem="relaxed")
    score, token = best_of(best, best_ids)
    return score, token, tl.sum(mass, axis=0)


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
    plan_ptr,  # [num_rows, PLAN_FIELDS] fp32
    shortlist_ptr,  # [num_rows, VOCAB] int16: places in a chunk, of those that may pass
    list_ptr,  # [num_rows, ROOM] fp32: logits in any order, as the next two
    list_scores_ptr,  # [num_rows, ROOM] fp32
    list_ids_ptr,  # [num_rows, ROOM] int32
    num_listed_ptr,  # [num_rows] int32, 0 before, as the next five
    bin_counts_ptr,  # [num_rows, NUM_BINS] int32: of what is listed, if by_k
    bin_masses_ptr,  # [num_rows, NUM_BINS] int64, if by_p
    num_above_ptr,  # [num_rows] int32
    total_ptr,  # [num_rows] int64: mass of all tokens
    mass_above_ptr,  # [num_rows] int64: of those that pass for certain
    best_ptr,  # [num_rows, num_chunks] fp32
    best_ids_ptr,  # [num_rows, num_chunks] int32
    logits_stride,
    tiles_a_chunk,
    num_chunks,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens that noise is made for at once
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, num_chunks). The logits are not from the kernel before, so they are loaded before the wait."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature, _, _, min_p, by_k, by_p, by_min_p = load_filters(
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
    lists = (
        list_ptr + row * ROOM,
        list_scores_ptr + row * ROOM,
        list_ids_ptr + row * ROOM,
        num_listed_ptr + row,
        bin_counts_ptr + row * NUM_BINS,
        bin_masses_ptr + row * NUM_BINS,
    )
    shortlist_ptr += row * VOCAB + begin
    is_weighed = by_p & (by_k == 0)
    number, num_listed, total = _shortlist(
        row_ptr, shortlist_ptr, x, begin, begin + tiles_a_chunk * TILE, reach, top, temperature,
        is_weighed, VOCAB, TILE, THREADS,
    )  # fmt: skip
    if is_weighed:
        tl.atomic_add(total_ptr + row, total, sem="relaxed")
    score = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    if number > 0:
        score, token, mass = _draw_or_list(
            row_ptr, shortlist_ptr, begin, number, num_listed, lists, noise_key, reach, top, temperature,
            by_k, by_p, VOCAB, BLOCK, ROOM,
        )  # fmt: skip
        if by_p:
            tl.atomic_add(mass_above_ptr + row, mass, sem="relaxed")
        if by_k:
            tl.atomic_add(num_above_ptr + row, number - num_listed, sem="relaxed")
    tl.store(best_ptr + row * num_chunks + chunk, score)
    tl.store(best_ids_ptr + row * num_chunks + chunk, token)
