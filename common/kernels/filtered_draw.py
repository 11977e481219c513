"""Draws the tokens of rows with top-k, top-p or min-p, reading their logits twice.

    1. `survey_kernel` finds out between which logits the limits are.
    2. `draw_kernel` puts the tokens of each chunk together that may pass, so that noise is made for no others. Of those
       above the logits in question only the best of a chunk counts; those between go to a list of the row.
    3. `decide_kernel` finds the limits in the list, and takes the best of all that pass.

A list has room for what mostly is in question. Where more is, or the limits are elsewhere after all, the last kernel
finds them in the row itself, and leaves it to the next one to draw by the threshold: slower, and the same.

Every sum is one of integers, so neither threshold nor token depends on how programs share the rows or on the rest of
the batch. Both are exact up to the rounding of probabilities, and tokens that tie with the last one kept are kept. Rows
without filters leave each kernel as soon as its predecessor is done.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.filter_bins import FEW, NUM_BINS, bin_of, bins_per_logit
from common.kernels.filter_decision import decide_kernel
from common.kernels.filter_survey import CHUNKS_AT_ONCE, PLAN_FIELDS, load_reach, survey_kernel
from common.kernels.filter_values import NUM_BUCKETS, best_of, load_filters, load_logits, mass_of
from common.kernels.gumbel import gumbel
from common.kernels.operands import MAX_VOCAB, SamplingTensors
from common.kernels.pdl import wait_for_predecessor

FEW_ROWS = 8  # up to so many, chunks are small, so that there are programs for all multiprocessors
SMALL_CHUNK, LARGE_CHUNK = 2048, 4096  # logits of one program
SHARE = 4  # of a large chunk's tokens one in so many is counted, of a small one's all
ROOM = 1 << 15  # tokens in a row's list
TILE = 8192  # tokens of a list that the search for a limit has in registers
ONE_WITHIN = tl.constexpr(1 << 16)


@triton.jit
def _compact(shortlist_ptr, is_within, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Store places of `is_within [CHUNK]` that are true, in any order.

    A thread has groups of four neighbours of the chunk. So a word of its own says which of its tokens are within, and
    only where the words begin is to be settled between threads.
    """
    GROUPS: tl.constexpr = CHUNK // (4 * THREADS)
    bits = 1 << (tl.arange(0, GROUPS)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :])
    within = tl.where(tl.reshape(is_within, (GROUPS, THREADS, 4)), bits + ONE_WITHIN, 0)
    words = tl.sum(tl.sum(within, axis=2), axis=0)
    counts = words >> 16
    first_places = tl.cumsum(counts, axis=0) - counts
    threads = tl.arange(0, THREADS)
    rest = words & 0xFFFF
    for i in tl.range(0, tl.max(counts, axis=0)):
        lowest = rest & -rest
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        place = (bit >> 2) * (4 * THREADS) + threads * 4 + (bit & 3)
        tl.store(shortlist_ptr + first_places + i, place.to(tl.int16), mask=rest != 0)
        rest ^= lowest
    tl.debug_barrier()  # what one thread has stored another one loads


@triton.jit
def _draw_from_chunk(
    row_ptr,
    shortlist_ptr,  # [CHUNK] int16, of this program
    lists,  # of the row: list_ptr, list_scores_ptr, list_ids_ptr, num_listed_ptr, bin_counts_ptr, bin_masses_ptr
    noise_key,  # seed, position
    reach,
    top,
    temperature,
    by_k,
    by_p,
    begin,
    is_within,  # [CHUNK]: which tokens may pass
    num_within,
    CHUNK: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Best score of the tokens that pass for certain, its lowest id, their mass and number. The others are listed."""
    list_ptr, list_scores_ptr, list_ids_ptr, num_listed_ptr, bin_counts_ptr, bin_masses_ptr = lists
    seed, position = noise_key
    lowest, highest, _, least = reach
    per_logit = bins_per_logit(lowest, highest, temperature)
    _compact(shortlist_ptr, is_within, CHUNK, THREADS)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.int64)
    num_listed = tl.full((), 0, tl.int32)
    for first in tl.range(0, num_within, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        present = entries < num_within
        ids = begin + tl.load(shortlist_ptr + entries, mask=present, other=0).to(tl.int32)
        x = load_logits(row_ptr, ids, begin + CHUNK)
        scaled = tl.div_rn(x, temperature)
        scores = scaled + gumbel(seed, position, ids)
        is_sure = present & (x > highest)
        is_better = is_sure & (scaled >= least) & ((scores > best) | ((scores == best) & (ids < best_ids)))
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, ids, best_ids)
        weights = mass_of(x, top, temperature)
        mass += tl.where(is_sure, weights, 0)
        is_listed = present & (is_sure == 0)
        listed = is_listed.to(tl.int32)
        num_here = tl.sum(listed, axis=0)
        if num_here > 0:
            num_listed += num_here
            first_place = tl.atomic_add(num_listed_ptr, num_here, sem="relaxed")
            list_places = first_place + tl.cumsum(listed, axis=0) - 1
            has_room = is_listed & (list_places < ROOM)
            tl.store(list_ptr + list_places, x, mask=has_room)
            tl.store(list_scores_ptr + list_places, scores, mask=has_room)
            tl.store(list_ids_ptr + list_places, ids, mask=has_room)
            bins = bin_of(x, highest, per_logit)
            if by_k:
                tl.atomic_add(bin_counts_ptr + bins, listed, mask=is_listed, sem="relaxed")
            if by_p:
                tl.atomic_add(bin_masses_ptr + bins, weights, mask=is_listed, sem="relaxed")
    score, token = best_of(best, best_ids)
    return score, token, tl.sum(mass, axis=0), num_within - num_listed


@triton.jit
def draw_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    seed_ptr,  # [num_rows] int64
    next_positions_ptr,  # [num_rows] int32: of the token to be chosen
    top_ptr,  # [num_rows] fp32
    plan_ptr,  # [num_rows, PLAN_FIELDS] fp32
    shortlist_ptr,  # [num_rows, NUM_CHUNKS * CHUNK] int16
    list_ptr,  # [num_rows, ROOM] fp32: logits in any order, as the next two
    list_scores_ptr,  # [num_rows, ROOM] fp32
    list_ids_ptr,  # [num_rows, ROOM] int32
    num_listed_ptr,  # [num_rows] int32, 0 before, as the next five
    bin_counts_ptr,  # [num_rows, NUM_BINS] int32: of what is listed, if by_k
    bin_masses_ptr,  # [num_rows, NUM_BINS] int64, if by_p
    num_above_ptr,  # [num_rows] int32
    total_ptr,  # [num_rows] int64: mass of all tokens
    mass_above_ptr,  # [num_rows] int64: of those that pass for certain
    best_ptr,  # [num_rows, NUM_CHUNKS] fp32
    best_ids_ptr,  # [num_rows, NUM_CHUNKS] int32
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens that noise is made for at once
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, NUM_CHUNKS). The logits are not from the kernel before, so they are loaded before the wait."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature, _, _, min_p, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    noise_key = (tl.load(seed_ptr + row), tl.load(next_positions_ptr + row))
    row_ptr = logits_ptr + row * logits_stride
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    is_filtered = by_k | by_p | by_min_p
    x = tl.load(row_ptr + tokens, mask=tokens < tl.where(is_filtered, VOCAB, 0), other=float("nan"))
    wait_for_predecessor(PDL)
    if is_filtered == 0:
        return
    top = tl.load(top_ptr + row)
    reach = load_reach(plan_ptr + row * PLAN_FIELDS, top, temperature, min_p, by_k | by_p, by_min_p)
    lowest, _, _, _ = reach
    lists = (
        list_ptr + row * ROOM,
        list_scores_ptr + row * ROOM,
        list_ids_ptr + row * ROOM,
        num_listed_ptr + row,
        bin_counts_ptr + row * NUM_BINS,
        bin_masses_ptr + row * NUM_BINS,
    )
    if by_p & (by_k == 0):
        masses = mass_of(tl.where(x == x, x, float("-inf")), top, temperature)
        tl.atomic_add(total_ptr + row, tl.sum(masses, axis=0), sem="relaxed")
    is_within = x >= lowest  # not NaN
    num_within = tl.sum(is_within.to(tl.int32), axis=0)
    score = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    if num_within > 0:
        score, token, mass, number = _draw_from_chunk(
            row_ptr, shortlist_ptr + (row * NUM_CHUNKS + chunk) * CHUNK, lists, noise_key, reach, top, temperature,
            by_k, by_p, chunk * CHUNK, is_within, num_within, CHUNK, THREADS, BLOCK, ROOM,
        )  # fmt: skip
        if by_p:
            tl.atomic_add(mass_above_ptr + row, mass, sem="relaxed")
        if by_k:
            tl.atomic_add(num_above_ptr + row, number, sem="relaxed")
    tl.store(best_ptr + row * NUM_CHUNKS + chunk, score)
    tl.store(best_ids_ptr + row * NUM_CHUNKS + chunk, token)


@dataclass(frozen=True, slots=True)
class FilterWorkspace:
    """What the kernels hand to one another. Of each chunk of a row, or of each row; laid out anew by each launch."""

    largest: Tensor  # [max_programs] fp32
    weights: Tensor  # [max_programs] fp32
    numbers: Tensor  # [max_programs] int32
    counts: Tensor  # [max_programs, NUM_BUCKETS] int32
    best: Tensor  # [max_programs] fp32
    best_ids: Tensor  # [max_programs] int32
    top: Tensor  # [max_rows] fp32
    plan: Tensor  # [max_rows, PLAN_FIELDS] fp32
    shortlist: Tensor  # [max_rows, tokens of all chunks] int16
    listed: Tensor  # [max_rows, room] fp32
    scores: Tensor  # [max_rows, room] fp32
    ids: Tensor  # [max_rows, room] int32
    few: Tensor  # [max_rows, FEW] fp32
    num_listed: Tensor  # [max_rows] int32, 0 whenever no launch is under way, as the next six
    bin_counts: Tensor  # [max_rows, NUM_BINS] int32
    bin_masses: Tensor  # [max_rows, NUM_BINS] int64
    num_above: Tensor  # [max_rows] int32
    total: Tensor  # [max_rows] int64
    mass_above: Tensor  # [max_rows] int64
    survey_arrivals: Tensor  # [max_rows] int32
    threshold: Tensor  # [max_rows] fp32, the result
    decided: Tensor  # [max_rows] int32, the result, of rows with filters


def make_workspace(max_rows: int, vocab: int, device: torch.device) -> FilterWorkspace:
    """Room for `max_rows` rows of `vocab` logits: 0.7 MB a row of 151,936."""
    assert vocab <= MAX_VOCAB, f"vocabulary of {vocab}: probabilities of {MAX_VOCAB} tokens add up within int64"
    small, large = triton.cdiv(vocab, SMALL_CHUNK), triton.cdiv(vocab, LARGE_CHUNK)
    max_programs = max(min(max_rows, FEW_ROWS) * small, max_rows * large)
    room = min(ROOM, triton.next_power_of_2(vocab))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

    return FilterWorkspace(
        largest=empty(max_programs),
        weights=empty(max_programs),
        numbers=empty(max_programs, dtype=torch.int32),
        counts=empty(max_programs, NUM_BUCKETS.value, dtype=torch.int32),
        best=empty(max_programs),
        best_ids=empty(max_programs, dtype=torch.int32),
        top=empty(max_rows),
        plan=empty(max_rows, PLAN_FIELDS.value),
        shortlist=empty(max_rows, large * LARGE_CHUNK, dtype=torch.int16),
        listed=empty(max_rows, room),
        scores=empty(max_rows, room),
        ids=empty(max_rows, room, dtype=torch.int32),
        few=empty(max_rows, FEW.value),
        num_listed=zeros(torch.int32),
        bin_counts=zeros(torch.int32, NUM_BINS.value),
        bin_masses=zeros(torch.int64, NUM_BINS.value),
        num_above=zeros(torch.int32),
        total=zeros(torch.int64),
        mass_above=zeros(torch.int64),
        survey_arrivals=zeros(torch.int32),
        threshold=empty(max_rows),
        decided=empty(max_rows, dtype=torch.int32),
    )


def filtered_draw(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    params: SamplingTensors,
    next_positions: Tensor,  # [num_rows] int32
    workspace: FilterWorkspace,
    *,
    pdl: bool = False,
) -> None:
    """Draws the tokens of rows that are filtered, which greedy ones are not.

    Leaves of each `reference.filter_threshold` in `workspace.threshold` and the token in `workspace.decided`; UNDECIDED
    if it is yet to be drawn, by the threshold.

    The operands are checked by `sampling.sample`; `num_rows` is not 0.
    """
    num_rows, vocab = logits.shape
    chunk = SMALL_CHUNK if num_rows <= FEW_ROWS else LARGE_CHUNK
    num_chunks = triton.cdiv(vocab, chunk)
    row = {
        "logits_ptr": logits,
        "temperature_ptr": params.temperature,
        "top_k_ptr": params.top_k,
        "top_p_ptr": params.top_p,
        "min_p_ptr": params.min_p,
        "top_ptr": workspace.top,
        "plan_ptr": workspace.plan,
        "logits_stride": logits.stride(0),
        "VOCAB": vocab,
        "NUM_CHUNKS": num_chunks,
        "ROOM": workspace.listed.shape[1],
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    drawn = {
        "list_ptr": workspace.listed,
        "list_scores_ptr": workspace.scores,
        "list_ids_ptr": workspace.ids,
        "num_listed_ptr": workspace.num_listed,
        "bin_counts_ptr": workspace.bin_counts,
        "bin_masses_ptr": workspace.bin_masses,
        "num_above_ptr": workspace.num_above,
        "total_ptr": workspace.total,
        "mass_above_ptr": workspace.mass_above,
        "best_ptr": workspace.best,
        "best_ids_ptr": workspace.best_ids,
    }
    chunks = triton.next_power_of_2(num_chunks)
    survey_kernel[(num_rows, num_chunks)](
        largest_ptr=workspace.largest,
        weights_ptr=workspace.weights,
        numbers_ptr=workspace.numbers,
        counts_ptr=workspace.counts,
        arrivals_ptr=workspace.survey_arrivals,
        CHUNK=chunk,
        CHUNKS=chunks,
        CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
        SAMPLE=chunk if chunk == SMALL_CHUNK else chunk // SHARE,
        num_warps=8,
        **row,
    )
    draw_kernel[(num_rows, num_chunks)](
        seed_ptr=params.seed,
        next_positions_ptr=next_positions,
        shortlist_ptr=workspace.shortlist,
        CHUNK=chunk,
        THREADS=256,
        BLOCK=256,
        num_warps=8,
        **row,
        **drawn,
    )
    decide_kernel[(num_rows,)](
        threshold_ptr=workspace.threshold,
        decided_ptr=workspace.decided,
        few_ptr=workspace.few,
        CHUNKS=chunks,
        BLOCK=4096,
        TILE=TILE,
        num_warps=16,
        **row,
        **drawn,
    )
