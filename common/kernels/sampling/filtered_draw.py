"""Draw of tokens for rows with top-k, top-p or min-p, reading the logits twice.

    1. `survey_kernel` finds a range of logits that contains the limits.
    2. `shortlist_kernel` gathers the tokens of each chunk that may pass, so only these get noise. Of tokens above
       the range, only the best counts. Tokens in the range go to a list of the row. The last program
       of a row takes the best of all tokens that pass.
    3. `limits_kernel` serves only undecided rows: the list overflows, or the limits lie elsewhere after all,
       or rounding cannot resolve the token's distance to a limit. The kernel finds the limits in the row itself,
       and the next kernel draws by the threshold. Such rows are slower, but the token is equal.

Every sum that counts is a sum of integers, so no token depends on the division of rows over programs or on other rows.
Limits are exact up to the rounding of probabilities. Tokens tied with the last token kept are kept. Rows without
filters leave each kernel as soon as its predecessor is done.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from common.kernels.base.sampling_operands import MAX_VOCAB, SamplingTensors
from common.kernels.sampling.filter_decision import NUM_SUMS
from common.kernels.sampling.filter_limits import limits_kernel
from common.kernels.sampling.filter_shortlist import shortlist_kernel
from common.kernels.sampling.filter_survey import CHUNKS_AT_ONCE, PLAN_FIELDS, survey_kernel
from common.kernels.sampling.filter_values import NUM_BUCKETS

FEW_ROWS = 8  # up to here, chunks are small, so that there are programs for all multiprocessors
SMALL_CHUNK, LARGE_CHUNK = 2048, 4096  # logits of a program, in registers
SHARE = 8  # for many rows, 1 token in SHARE is counted; for few rows, all
MOST_PROGRAMS = 528  # drawing programs, all at once on a large GPU; with more tiles, a program takes several
MOST_TILES = 16  # of a chunk, so that a token's place in its chunk has 16 bits
ROOM = 1 << 15  # tokens in a row's list
LIST_TILE = 1024  # tokens of the list held in registers by the last program of a row
TILE = 8192  # tokens of a row held in registers in the search for limits


@dataclass(frozen=True, slots=True)
class FilterWorkspace:
    """Data handed from kernel to kernel, for each chunk of a row or for each row; laid out anew by each launch."""

    largest: Tensor  # [max_programs] fp32
    weights: Tensor  # [max_programs] fp32
    numbers: Tensor  # [max_programs] int32
    counts: Tensor  # [max_programs, NUM_BUCKETS] int32
    top: Tensor  # [max_rows] fp32
    total: Tensor  # [max_rows] fp32
    plan: Tensor  # [max_rows, PLAN_FIELDS] fp32
    shortlist: Tensor  # [max_rows, vocab] int16
    listed: Tensor  # [max_rows, room] fp32
    scores: Tensor  # [max_rows, room] fp32
    ids: Tensor  # [max_rows, room] int32
    sums: Tensor  # [max_rows, NUM_SUMS] int64, 0 between launches
    survey_arrivals: Tensor  # [max_rows] int32, 0 between launches
    arrivals: Tensor  # [max_rows] int32, 0 between launches
    decided: Tensor  # [max_rows] int32, the result for rows with filters
    threshold: Tensor  # [max_rows] fp32, the result for undecided rows


def make_workspace(max_rows: int, vocab: int, device: torch.device) -> FilterWorkspace:
    """Allocate room for `max_rows` rows of `vocab` logits: 0.7 MB a row of 151,936."""
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
        top=empty(max_rows),
        total=empty(max_rows),
        plan=empty(max_rows, PLAN_FIELDS.value),
        shortlist=empty(max_rows, vocab, dtype=torch.int16),
        listed=empty(max_rows, room),
        scores=empty(max_rows, room),
        ids=empty(max_rows, room, dtype=torch.int32),
        sums=zeros(torch.int64, NUM_SUMS.value),
        survey_arrivals=zeros(torch.int32),
        arrivals=zeros(torch.int32),
        decided=empty(max_rows, dtype=torch.int32),
        threshold=empty(max_rows),
    )


def filtered_draw(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    params: SamplingTensors,
    next_positions: Tensor,  # [num_rows] int32
    workspace: FilterWorkspace,
    *,
    pdl: bool = False,
) -> None:
    """Draw the tokens of rows with filters; greedy rows have none.

    Leaves each token in `workspace.decided`, or UNDECIDED if the token is yet to be drawn. For undecided rows,
    `reference.filter_threshold` is left in `workspace.threshold`.

    `sampling.sample` checks the operands; `num_rows` is not 0.
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
        "logits_stride": logits.stride(0),
        "VOCAB": vocab,
        "ROOM": workspace.listed.shape[1],
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    survey_kernel[(num_rows, num_chunks)](
        largest_ptr=workspace.largest,
        weights_ptr=workspace.weights,
        numbers_ptr=workspace.numbers,
        counts_ptr=workspace.counts,
        arrivals_ptr=workspace.survey_arrivals,
        total_ptr=workspace.total,
        plan_ptr=workspace.plan,
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
        total_ptr=workspace.total,
        plan_ptr=workspace.plan,
        shortlist_ptr=workspace.shortlist,
        list_ptr=workspace.listed,
        list_scores_ptr=workspace.scores,
        list_ids_ptr=workspace.ids,
        sums_ptr=workspace.sums,
        arrivals_ptr=workspace.arrivals,
        decided_ptr=workspace.decided,
        tiles_a_chunk=tiles_a_chunk,
        num_chunks=drawn_chunks,
        TILE=tile,
        THREADS=256,
        BLOCK=256,
        DECISION_BLOCK=LIST_TILE,
        num_warps=8,
        maxnreg=64,  # so that four programs fit on a multiprocessor
        **row,
    )
    limits_kernel[(num_rows,)](
        decided_ptr=workspace.decided,
        few_ptr=workspace.listed,
        threshold_ptr=workspace.threshold,
        BLOCK=TILE,
        num_warps=16,
        **row,
    )
