"""Draws the tokens of rows with top-k, top-p or min-p, reading their logits twice.

    1. `survey_kernel` finds out between which logits the limits are.
    2. `shortlist_kernel` puts the tokens of each chunk together that may pass, so that noise is made for no others. Of
       those above the logits in question only the best of a chunk counts; those between go to a list of the row.
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
from torch import Tensor

from common.kernels.filter_bins import FEW, NUM_BINS
from common.kernels.filter_decision import decide_kernel
from common.kernels.filter_shortlist import shortlist_kernel
from common.kernels.filter_survey import CHUNKS_AT_ONCE, PLAN_FIELDS, survey_kernel
from common.kernels.filter_values import NUM_BUCKETS
from common.kernels.operands import MAX_VOCAB, SamplingTensors

FEW_ROWS = 8  # up to so many, chunks are small, so that there are programs for all multiprocessors
SMALL_CHUNK, LARGE_CHUNK = 2048, 4096  # logits that a program has in registers
SHARE = 8  # of many rows' tokens one in so many is counted, of few rows' all
MOST_PROGRAMS = 528  # that draw, all at once on a large GPU; each takes several tiles where there are more
MOST_TILES = 16  # so that a token's place in its chunk has 16 bits
ROOM = 1 << 15  # tokens in a row's list
TILE = 8192  # tokens of a list that the search for a limit has in registers


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
    shortlist: Tensor  # [max_rows, vocab] int16
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
        shortlist=empty(max_rows, vocab, dtype=torch.int16),
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
    has_few = num_rows <= FEW_ROWS
    tile = SMALL_CHUNK if has_few else LARGE_CHUNK
    num_tiles = triton.cdiv(vocab, tile)
    tiles_a_chunk = min(triton.cdiv(num_tiles * num_rows, MOST_PROGRAMS), MOST_TILES)
    drawn_chunks = triton.cdiv(num_tiles, tiles_a_chunk)
    chunk = tile if has_few else 2 * tile  # of the survey
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
        "ROOM": workspace.listed.shape[1],
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    drawn = {
        "num_chunks": drawn_chunks,
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
    survey_kernel[(num_rows, num_chunks)](
        largest_ptr=workspace.largest,
        weights_ptr=workspace.weights,
        numbers_ptr=workspace.numbers,
        counts_ptr=workspace.counts,
        arrivals_ptr=workspace.survey_arrivals,
        CHUNK=chunk,
        NUM_CHUNKS=num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
        SAMPLE=chunk if has_few else chunk // SHARE,
        num_warps=8,
        **row,
    )
    shortlist_kernel[(num_rows, drawn_chunks)](
        seed_ptr=params.seed,
        next_positions_ptr=next_positions,
        shortlist_ptr=workspace.shortlist,
        tiles_a_chunk=tiles_a_chunk,
        TILE=tile,
        THREADS=256,
        BLOCK=256,
        num_warps=8,
        maxnreg=64,  # so that four programs fit on a multiprocessor
        **row,
        **drawn,
    )
    decide_kernel[(num_rows,)](
        threshold_ptr=workspace.threshold,
        decided_ptr=workspace.decided,
        few_ptr=workspace.few,
        CHUNKS=triton.next_power_of_2(num_tiles),
        BLOCK=4096,
        TILE=TILE,
        num_warps=16,
        **row,
        **drawn,
    )
