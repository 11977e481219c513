"""Choice of the next token of every row, without a sort and without the host (Gumbel-max trick).

Four kernels run. Three serve rows with filters (`filtered_draw`). In other rows, the fourth finds the best token of
each chunk of the vocabulary; a row's last program finds the best of the chunks. In a decode step, the last program also
makes the row ready for the next step, and stores the token where the host finds it. A copy between two steps would keep
the device waiting.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_column
from common.kernels.base.last_program import is_last
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.base.sampling_operands import NO_CHOICE, SamplingTensors, TokenRing
from common.kernels.sampling import filtered_draw as filters
from common.kernels.sampling.filter_decision import UNDECIDED
from common.kernels.sampling.filter_values import best_of, load_filters, load_logits
from common.kernels.sampling.filtered_draw import FilterWorkspace
from common.kernels.sampling.gumbel import gumbel_from

TILE = 1024  # logits of a program, in registers
MOST_PROGRAMS = 640  # all at once on a large GPU; with more tiles, a program takes several
_NO_CHOICE = tl.constexpr(NO_CHOICE)


@triton.jit
def _finish(
    row,
    token,  # or NO_CHOICE
    next_position,
    turn,
    columns,  # tokens_ptr, positions_ptr, next_positions_ptr, ring_ptr, turns_ptr
    max_len,
    ADVANCE: tl.constexpr,
    RING_SLOTS: tl.constexpr,
):
    """Store the token of a row; if ADVANCE, make the row ready for the next step, unless it has no choice.

    No other program of the row still needs the row's position and turn.
    """
    tokens_ptr, positions_ptr, next_positions_ptr, ring_ptr, turns_ptr = columns
    if ADVANCE:
        has_choice = token >= 0
        tl.store(tokens_ptr + row, token, mask=has_choice)
        tl.store(ring_ptr + row * RING_SLOTS + turn, token)
        tl.store(turns_ptr + row, (turn + 1) % RING_SLOTS)
        grows = has_choice & (next_position > 0) & (next_position < max_len)  # padding stays padding
        tl.store(positions_ptr + row, next_position, mask=grows)
        tl.store(next_positions_ptr + row, next_position + 1, mask=grows)
    else:
        tl.store(tokens_ptr + row, token)


@triton.jit
def _best_of_chunk(
    row_ptr,
    begin,
    end,  # a multiple of TILE further
    temperature,
    threshold,  # of scaled logits
    seed,
    next_position,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the best score of the tokens from `begin` to before `end`, and the lowest id with this score."""
    upcoming = load_logits(row_ptr, begin + tl.arange(0, TILE), VOCAB)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.zeros((TILE,), tl.int32)
    for first in tl.range(begin, end, TILE):
        tokens = first + tl.arange(0, TILE)
        scores = upcoming
        upcoming = load_logits(row_ptr, tokens + TILE, tl.where(first + TILE < end, VOCAB, 0))
        if temperature > 0.0:
            noise = gumbel_from(seed, next_position, first, TILE)
            scaled = tl.div_rn(scores, temperature)
            scores = tl.where(scaled >= threshold, scaled + noise, float("-inf"))
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, tokens, best_ids)
    return best_of(best, best_ids)


@triton.jit(do_not_specialize=["max_len", "tiles_a_chunk", "num_chunks"])
def _choose_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    seed_ptr,  # [num_rows] int64
    next_positions_ptr,  # [num_rows] int32: of the token to be chosen; if ADVANCE the seq_lens, which grow
    positions_ptr,  # [num_rows] int32, if ADVANCE: of the last token
    ring_ptr,  # [num_rows, RING_SLOTS] int32, if ADVANCE: memory of the host
    turns_ptr,  # [num_rows] int32, if ADVANCE: slot of the row's next token, below RING_SLOTS
    threshold_ptr,  # [num_rows] fp32, for undecided rows with filters
    decided_ptr,  # [num_rows] int32, for rows with filters: the token, NO_CHOICE, or UNDECIDED
    best_ptr,  # [num_rows, num_chunks] fp32
    best_ids_ptr,  # [num_rows, num_chunks] int32
    arrivals_ptr,  # [num_rows] int32, 0 before and after
    tokens_ptr,  # [num_rows] int32
    logits_stride,
    max_len,  # if ADVANCE: seq_lens grow up to this
    tiles_a_chunk,
    num_chunks,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two, at least num_chunks
    ADVANCE: tl.constexpr,
    RING_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, num_chunks). A program finds the best token of a chunk, a row's last program the best of all.

    Ties go to the lowest id. If no token has a score, the row stays as it is, and the host gets NO_CHOICE. In rows
    without filters, the best is found before the wait, because nothing from the kernel before is needed. For a decided
    row, the token is only stored.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    begin = chunk * tiles_a_chunk * TILE
    end = begin + tiles_a_chunk * TILE
    temperature, _, _, _, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    is_filtered = by_k | by_p | by_min_p
    next_position = tl.load(next_positions_ptr + row)
    turn = tl.load(turns_ptr + row) if ADVANCE else 0
    columns = (tokens_ptr, positions_ptr, next_positions_ptr, ring_ptr, turns_ptr)
    row_ptr = logits_ptr + row * logits_stride
    seed = tl.load(seed_ptr + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    best = threshold
    token = tl.full((), 0, tl.int32)
    if is_filtered == 0:
        best, token = _best_of_chunk(row_ptr, begin, end, temperature, threshold, seed, next_position, VOCAB, TILE)
    wait_for_predecessor(PDL)
    decided = tl.full((), UNDECIDED, tl.int32)
    if is_filtered:
        decided = tl.load(decided_ptr + row)
    if decided != UNDECIDED:
        if chunk == 0:
            _finish(row, decided, next_position, turn, columns, max_len, ADVANCE, RING_SLOTS)
        return
    if is_filtered:
        threshold = tl.load(threshold_ptr + row)
        best, token = _best_of_chunk(row_ptr, begin, end, temperature, threshold, seed, next_position, VOCAB, TILE)
    best_ptr += row * num_chunks
    best_ids_ptr += row * num_chunks
    tl.store(best_ptr + chunk, best)
    tl.store(best_ids_ptr + chunk, token)
    if is_last(arrivals_ptr + row, num_chunks):
        chunks = tl.arange(0, CHUNKS)
        bests = tl.load(best_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))
        best, winner = tl.max(bests, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(best > float("-inf"), tl.load(best_ids_ptr + winner), _NO_CHOICE)
        _finish(row, token, next_position, turn, columns, max_len, ADVANCE, RING_SLOTS)


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Data handed from kernel to kernel."""

    filters: FilterWorkspace
    best: Tensor  # [max_rows, num_chunks] fp32
    best_ids: Tensor  # [max_rows, num_chunks] int32
    arrivals: Tensor  # [max_rows] int32, 0 between launches


def make_workspace(max_rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
    """Allocate room for `max_rows` rows of `vocab` logits."""
    shape = (max_rows, triton.cdiv(vocab, TILE))
    return SamplingWorkspace(
        filters=filters.make_workspace(max_rows, vocab, device),
        best=torch.empty(shape, dtype=torch.float32, device=device),
        best_ids=torch.empty(shape, dtype=torch.int32, device=device),
        arrivals=torch.zeros((max_rows,), dtype=torch.int32, device=device),
    )


def sample(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    params: SamplingTensors,
    positions: Tensor,  # [num_rows] int32
    workspace: SamplingWorkspace,
    *,
    pdl: bool = False,
) -> Tensor:
    """Choose the token of each row by the rules of `reference.sample`: `[num_rows]` int32."""
    tokens = torch.empty((logits.shape[0],), dtype=torch.int32, device=logits.device)
    _choose(logits, params, positions, None, None, tokens, workspace, pdl)
    return tokens


def sample_and_advance(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    params: SamplingTensors,
    token_ids: Tensor,  # [num_rows] int32, like positions and seq_lens
    positions: Tensor,
    seq_lens: Tensor,
    max_len: int,
    ring: TokenRing,
    workspace: SamplingWorkspace,
    *,
    pdl: bool = False,
) -> None:
    """Do `sample` at `seq_lens`, then `reference.advance` up to `max_len` and `reference.land`.

    Each row is left ready for the next step. An event recorded afterwards tells when the token is in `ring`.
    """
    _choose(logits, params, seq_lens, positions, ring, token_ids, workspace, pdl, max_len)


def _choose(
    logits: Tensor,
    params: SamplingTensors,
    next_positions: Tensor,
    positions: Tensor | None,  # if given, advanced with `next_positions`
    ring: TokenRing | None,  # if given, `positions` is given, too
    tokens: Tensor,
    workspace: SamplingWorkspace,
    pdl: bool,
    max_len: int = 0,  # with `positions` only
) -> None:
    columns = (next_positions, tokens) if positions is None else (next_positions, positions, tokens)
    _check(logits, params, columns, workspace)
    if ring is not None:
        _check_ring(ring, logits.shape[0])
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    filters.filtered_draw(logits, params, next_positions, workspace.filters, pdl=pdl)
    num_tiles = triton.cdiv(vocab, TILE)
    tiles_a_chunk = triton.cdiv(num_tiles * num_rows, MOST_PROGRAMS)
    num_chunks = triton.cdiv(num_tiles, tiles_a_chunk)
    unused = next_positions
    _choose_kernel[(num_rows, num_chunks)](
        logits_ptr=logits,
        temperature_ptr=params.temperature,
        top_k_ptr=params.top_k,
        top_p_ptr=params.top_p,
        min_p_ptr=params.min_p,
        seed_ptr=params.seed,
        next_positions_ptr=next_positions,
        positions_ptr=unused if positions is None else positions,
        ring_ptr=unused if ring is None else ring.tokens_cpu,
        turns_ptr=unused if ring is None else ring.turns,
        threshold_ptr=workspace.filters.threshold,
        decided_ptr=workspace.filters.decided,
        best_ptr=workspace.best,
        best_ids_ptr=workspace.best_ids,
        arrivals_ptr=workspace.arrivals,
        tokens_ptr=tokens,
        logits_stride=logits.stride(0),
        max_len=max_len,
        VOCAB=vocab,
        tiles_a_chunk=tiles_a_chunk,
        num_chunks=num_chunks,
        TILE=TILE,
        CHUNKS=triton.next_power_of_2(num_tiles),
        ADVANCE=positions is not None,
        RING_SLOTS=1 if ring is None else ring.tokens_cpu.shape[1],
        PDL=pdl,
        num_warps=4,
        maxnreg=96,  # so that five programs fit on a multiprocessor
        launch_pdl=pdl,
    )


def _check(
    logits: Tensor, params: SamplingTensors, int32_columns: tuple[Tensor, ...], workspace: SamplingWorkspace
) -> None:
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are fp32 with contiguous rows"
    check_column("temperature", params.temperature, num_rows, torch.float32)
    check_column("top_k", params.top_k, num_rows)
    check_column("top_p", params.top_p, num_rows, torch.float32)
    check_column("min_p", params.min_p, num_rows, torch.float32)
    check_column("seed", params.seed, num_rows, torch.int64)
    for column in int32_columns:
        check_column("a column of the rows", column, num_rows)
    assert num_rows <= workspace.best.shape[0], f"{num_rows} rows: the workspace holds fewer"
    assert workspace.best.shape[1] == triton.cdiv(vocab, TILE), f"vocabulary of {vocab}: made for another"


def _check_ring(ring: TokenRing, num_rows: int) -> None:
    tokens_cpu, turns = ring.tokens_cpu, ring.turns
    assert num_rows <= tokens_cpu.shape[0] == turns.shape[0], f"{num_rows} rows: the ring has {tokens_cpu.shape[0]}"
    assert tokens_cpu.is_contiguous() and turns.is_contiguous(), "a ring is contiguous"
    assert tokens_cpu.dtype == turns.dtype == torch.int32, f"a ring of {tokens_cpu.dtype} and {turns.dtype}: int32"
    assert not turns.is_cuda or tokens_cpu.is_pinned(), "a GPU reaches pinned memory of the host only"
