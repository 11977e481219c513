"""The token of a row with filters: the last kernel of `filtered_draw`."""

import triton
import triton.language as tl

from common.kernels import operands
from common.kernels.filter_bins import FEW, NUM_BINS, lowest_listed
from common.kernels.filter_limits import lowest_of_many, mass_from
from common.kernels.filter_survey import LOWEST, PLAN_FIELDS, load_reach
from common.kernels.filter_values import LARGEST, best_of, load_filters, load_logits, mass_limit, order_of, value_of
from common.kernels.pdl import wait_for_predecessor

UNDECIDED = tl.constexpr(-3)
NO_CHOICE = tl.constexpr(operands.NO_CHOICE)


@triton.jit
def _threshold(
    row_ptr,
    list_ptr,
    few_ptr,
    sums,  # of the row: num_listed, num_above, mass_above, total; of its list: counts and masses by bins
    reach,
    top,
    temperature,
    top_k,
    top_p,
    by_k,
    by_p,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Smallest scaled logit that passes all filters, and whether the limits were found in the list."""
    num_listed, num_above, above, total, counts, masses = sums
    lowest, _, is_listed, least = reach
    is_whole = lowest == LOWEST  # all tokens are above or listed
    is_found = is_listed & (num_listed <= ROOM)
    if by_k:
        is_found &= (num_above < top_k) & (is_whole | (num_above + num_listed >= top_k))
    scaled_lowest = tl.div_rn(tl.where(is_whole, 0.0, lowest), temperature)  # what is below may tie with it
    cut = order_of(tl.full((), float("-inf"), tl.float32))
    if by_k:
        if is_found:
            rest = (top_k - num_above).to(tl.int64)
            cut = lowest_listed(
                list_ptr, num_listed, few_ptr, counts.to(tl.int64), rest, reach, top, temperature, False, BLOCK, TILE
            )
            is_found &= is_whole | (value_of(cut) > scaled_lowest)
        else:
            cut = lowest_of_many(row_ptr, VOCAB, list_ptr, top_k.to(tl.int64), top, temperature, False, TILE)
    if by_p:
        below = tl.sum(masses, axis=0)
        if is_found:
            if by_k:
                below = mass_from(list_ptr, num_listed, cut, top, temperature, BLOCK)
        else:
            above = tl.full((), 0, tl.int64)
            below = mass_from(row_ptr, VOCAB, cut, top, temperature, TILE)
        if by_k:
            total = above + below
        limit = mass_limit(top_p, total)
        is_found &= (above < limit) & (is_whole | (above + below >= limit))
        if is_found:
            by_mass = lowest_listed(
                list_ptr, num_listed, few_ptr, masses, limit - above, reach, top, temperature, True, BLOCK, TILE
            )
        else:
            by_mass = lowest_of_many(row_ptr, VOCAB, list_ptr, limit, top, temperature, True, TILE)
        cut = tl.maximum(cut, by_mass)
    threshold = tl.maximum(value_of(cut), least)
    return threshold, is_found & (is_whole | (threshold > scaled_lowest))


@triton.jit
def _best_listed(lists, num_listed, threshold, temperature, known, BLOCK: tl.constexpr):
    """The better one of `known`, a score and its id, and the best of the list that passes."""
    list_ptr, list_scores_ptr, list_ids_ptr = lists
    score, token = known
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for first in tl.range(0, num_listed, BLOCK):
        places = first + tl.arange(0, BLOCK)
        scores = tl.load(list_scores_ptr + places, mask=places < num_listed, other=float("-inf"))
        passes = tl.div_rn(load_logits(list_ptr, places, num_listed), temperature) >= threshold
        scores = tl.where(passes, scores, float("-inf"))
        ids = tl.load(list_ids_ptr + places, mask=places < num_listed, other=0x7FFFFFFF)
        is_better = (scores > best) | ((scores == best) & (ids < best_ids))
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, ids, best_ids)
    listed, id_listed = best_of(best, best_ids)
    is_better = (listed > score) | ((listed == score) & (id_listed < token))
    return tl.where(is_better, listed, score), tl.where(is_better, id_listed, token)


@triton.jit(do_not_specialize=["num_chunks"])
def decide_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    top_ptr,  # [num_rows] fp32
    plan_ptr,  # [num_rows, PLAN_FIELDS] fp32
    list_ptr,  # [num_rows, ROOM] fp32
    list_scores_ptr,  # [num_rows, ROOM] fp32
    list_ids_ptr,  # [num_rows, ROOM] int32
    num_listed_ptr,  # [num_rows] int32, set to 0, as the next five
    bin_counts_ptr,  # [num_rows, NUM_BINS] int32
    bin_masses_ptr,  # [num_rows, NUM_BINS] int64
    num_above_ptr,  # [num_rows] int32
    total_ptr,  # [num_rows] int64
    mass_above_ptr,  # [num_rows] int64
    best_ptr,  # [num_rows, num_chunks] fp32
    best_ids_ptr,  # [num_rows, num_chunks] int32
    threshold_ptr,  # [num_rows] fp32, of scaled logits
    decided_ptr,  # [num_rows] int32: the token, NO_CHOICE, or UNDECIDED
    few_ptr,  # [num_rows, FEW] fp32
    logits_stride,
    num_chunks,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two, at least num_chunks
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
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
    top = tl.load(top_ptr + row)
    reach = load_reach(plan_ptr + row * PLAN_FIELDS, top, temperature, min_p, by_k | by_p, by_min_p)
    num_listed = tl.load(num_listed_ptr + row)
    num_above = tl.load(num_above_ptr + row)
    mass_above = tl.load(mass_above_ptr + row)
    total = tl.load(total_ptr + row)
    bins = row * NUM_BINS + tl.arange(0, NUM_BINS)
    counts = tl.load(bin_counts_ptr + bins, mask=by_k, other=0)
    masses = tl.load(bin_masses_ptr + bins, mask=by_p, other=0)
    tl.debug_barrier()  # every thread has read
    tl.store(bin_counts_ptr + bins, tl.zeros((NUM_BINS,), tl.int32), mask=by_k)
    tl.store(bin_masses_ptr + bins, tl.zeros((NUM_BINS,), tl.int64), mask=by_p)
    tl.store(num_listed_ptr + row, 0)
    tl.store(num_above_ptr + row, 0)
    tl.store(mass_above_ptr + row, tl.zeros((), tl.int64))
    tl.store(total_ptr + row, tl.zeros((), tl.int64))
    has_choice = top > -LARGEST
    list_ptr += row * ROOM
    threshold, is_found = _threshold(
        logits_ptr + row * logits_stride, list_ptr, few_ptr + row * FEW,
        (num_listed, num_above, mass_above, total, counts, masses), reach, top, temperature,
        top_k, top_p, by_k & has_choice, by_p & has_choice, VOCAB, BLOCK, TILE, ROOM,
    )  # fmt: skip
    chunks = tl.arange(0, CHUNKS)
    present = chunks < num_chunks
    bests = tl.load(best_ptr + row * num_chunks + chunks, mask=present, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * num_chunks + chunks, mask=present, other=0x7FFFFFFF)
    lists = (list_ptr, list_scores_ptr + row * ROOM, list_ids_ptr + row * ROOM)
    num_listed = tl.minimum(num_listed, ROOM)
    score, token = _best_listed(lists, num_listed, threshold, temperature, best_of(bests, ids), BLOCK)
    decided = tl.where(score > float("-inf"), token, NO_CHOICE)
    tl.store(decided_ptr + row, tl.where(is_found, decided, UNDECIDED))
    tl.store(threshold_ptr + row, threshold)
