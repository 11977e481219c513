"""Adjustments of logits requested before a token is chosen: penalties, biases and bans.

A single launch serves the rows of a step with adjustments; programs of other rows leave at once. The data of
adjustments lie in slots, which stay in place when rows move. Occurrences of tokens are counted here, too. A step's
input is the token chosen last, so the program with this token's logit counts the token first. In rows with bad words,
the first program keeps the token among the latest outputs, for the next steps.

Grammar masks are read from host memory, because masks become known while the step runs. A kernel of a single program
first looks which masks are ready, because all programs of a row must see the same state.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base import sampling_operands
from common.kernels.base.checks import check_column
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.base.sampling_operands import (
    EDIT_FIELDS,
    MAX_EDITS,
    MAX_WORDS,
    WORD_TOKENS,
    AdjustmentTensors,
    GrammarMasks,
    SamplingTensors,
)

CHUNK = 1024  # logits of one program
EDITS = 128  # edits loaded by a program at once
WORDS = 128  # bad words loaded by a program at once
IN_PROMPT = tl.constexpr(sampling_operands.IN_PROMPT)


@triton.jit
def _load_edits(edits_ptr, begin, num_edits, first, end, MAX_EDITS: tl.constexpr, EDITS: tl.constexpr):
    """Load tokens, values and ends of the edits from `begin` on; tell which are for tokens from `first` to `end`."""
    edits = begin + tl.arange(0, EDITS)
    present = edits < num_edits
    tokens = tl.load(edits_ptr + edits, mask=present, other=-1)
    values = tl.load(edits_ptr + MAX_EDITS + edits, mask=present, other=0).to(tl.float32, bitcast=True)
    ends = tl.load(edits_ptr + 2 * MAX_EDITS + edits, mask=present, other=0)
    return tokens, values, ends, (tokens >= first) & (tokens < end)


@triton.jit(do_not_specialize=["num_rows"])
def _find_late_kernel(
    slots_ptr,  # [num_rows] int32
    next_positions_ptr,  # [num_rows] int32
    places_ptr,  # [num_slots] int32
    positions_cpu_ptr,  # [num_places] int32: host memory, which the host may write meanwhile
    are_late_ptr,  # [num_rows] int32
    num_rows,
    ROWS: tl.constexpr,  # power of two, at least num_rows
    PDL: tl.constexpr,
):
    """Grid: (1,). Store for every row whether a grammar's mask for the next token is missing."""
    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    slot = tl.load(slots_ptr + rows, mask=inside, other=-1)
    wait_for_predecessor(PDL)
    place = tl.load(places_ptr + slot, mask=slot >= 0, other=-1)
    has_mask_for = tl.load(positions_cpu_ptr + place, mask=place >= 0, other=0, volatile=True)
    is_late = (place >= 0) & (has_mask_for != tl.load(next_positions_ptr + rows, mask=inside, other=0))
    tl.store(are_late_ptr + rows, is_late.to(tl.int32), mask=inside)


@triton.jit
def _ban_words(
    row_ptr,
    words_ptr,  # [WORD_TOKENS, MAX_WORDS] int32
    num_words,
    recent_ptr,  # [WORD_TOKENS] int32
    last,  # the last output; -1 if already among the recent outputs
    next_position,
    first,
    end,
    WORD_TOKENS: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Ban tokens from `first` to `end` that are the last of a word whose other tokens are the latest outputs."""
    for begin in tl.range(0, num_words, WORDS):
        words = begin + tl.arange(0, WORDS)
        tokens = tl.load(words_ptr + words, mask=words < num_words, other=-1)
        is_next = (tokens >= first) & (tokens < end)
        for back in tl.static_range(1, WORD_TOKENS):
            wanted = tl.load(words_ptr + back * MAX_WORDS + words, mask=is_next, other=-1)
            output = tl.load(recent_ptr + (next_position - back) % WORD_TOKENS, mask=next_position >= back, other=-1)
            if back == 1:
                output = tl.where(last >= 0, last, output)
            is_next &= (wanted < 0) | (wanted == output)
        tl.store(row_ptr + tokens, float("-inf"), mask=is_next)


@triton.jit
def _adjust_logits_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    slots_ptr,  # [num_rows] int32: -1 for rows that stay as they are
    token_ids_ptr,  # [num_rows] int32: the last token, not counted yet; -1 if all are counted
    next_positions_ptr,  # [num_rows] int32: of the token to be chosen
    presence_ptr,  # [num_rows] fp32
    frequency_ptr,  # [num_rows] fp32
    repetition_ptr,  # [num_rows] fp32
    counts_ptr,  # [num_slots, VOCAB] int32
    masks_ptr,  # [num_slots, MASK_WORDS] int32
    edits_ptr,  # [num_slots, 3, MAX_EDITS] int32
    num_edits_ptr,  # [num_slots] int32
    places_ptr,  # [num_slots] int32, if HAS_GRAMMARS
    masks_cpu_ptr,  # [num_places, MASK_WORDS] int32, if HAS_GRAMMARS: host memory
    are_late_ptr,  # [num_rows] int32, if HAS_GRAMMARS
    words_ptr,  # [num_slots, WORD_TOKENS, MAX_WORDS] int32
    num_words_ptr,  # [num_slots] int32
    recent_ptr,  # [num_slots, WORD_TOKENS] int32
    logits_stride,
    VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    MAX_EDITS: tl.constexpr,
    EDIT_FIELDS: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    WORD_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    EDITS: tl.constexpr,
    HAS_GRAMMARS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, cdiv(VOCAB, CHUNK)). A program takes a chunk of a row: biases, bans, then penalties and masks.

    A row with a late mask loses all logits and counts nothing, because the row's step is repeated.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    wait_for_predecessor(PDL)
    if slot < 0:
        return
    first = tl.program_id(1) * CHUNK
    end = tl.minimum(first + CHUNK, VOCAB)
    row_ptr = logits_ptr + row * logits_stride
    next_position = tl.load(next_positions_ptr + row)
    last = tl.load(token_ids_ptr + row)
    if HAS_GRAMMARS:
        is_late = tl.load(are_late_ptr + row) != 0
        last = tl.where(is_late, -1, last)
    edits_ptr += slot * EDIT_FIELDS * MAX_EDITS
    num_edits = tl.load(num_edits_ptr + slot)
    for begin in tl.range(0, num_edits, EDITS):  # a token has at most one bias, so no logit is added to twice
        edited, values, _, is_here = _load_edits(edits_ptr, begin, num_edits, first, end, MAX_EDITS, EDITS)
        is_here &= values > float("-inf")
        tl.store(row_ptr + edited, tl.load(row_ptr + edited, mask=is_here) + values, mask=is_here)
    tl.debug_barrier()  # a token may be biased and banned
    for begin in tl.range(0, num_edits, EDITS):
        edited, values, ends, is_here = _load_edits(edits_ptr, begin, num_edits, first, end, MAX_EDITS, EDITS)
        is_here &= (values == float("-inf")) & (next_position < ends)
        tl.store(row_ptr + edited, values, mask=is_here)
    num_words = tl.load(num_words_ptr + slot)
    if num_words > 0:
        words_ptr += slot * WORD_TOKENS * MAX_WORDS
        recent_ptr += slot * WORD_TOKENS
        _ban_words(
            row_ptr, words_ptr, num_words, recent_ptr, last, next_position, first, end, WORD_TOKENS, MAX_WORDS, WORDS
        )
        if (first == 0) & (last >= 0):  # no program of this step reads this entry
            tl.store(recent_ptr + (next_position - 1) % WORD_TOKENS, last)
    tl.debug_barrier()  # a thread loads values stored by other threads

    tokens = first + tl.arange(0, CHUNK)
    inside = tokens < VOCAB
    count_ptr = counts_ptr + slot * VOCAB + tokens
    is_last = inside & (tokens == last)
    count = tl.load(count_ptr, mask=inside, other=0) + is_last.to(tl.int32)
    tl.store(count_ptr, count, mask=is_last)
    num_outputs = count & (IN_PROMPT - 1)
    x = tl.load(row_ptr + tokens, mask=inside, other=float("-inf"))
    repetition = tl.load(repetition_ptr + row)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(count > 0, repeated, x)
    x -= tl.load(frequency_ptr + row) * num_outputs.to(tl.float32)
    x -= tl.where(num_outputs > 0, tl.load(presence_ptr + row), 0.0)
    words = tl.load(masks_ptr + slot * MASK_WORDS + tokens // 32, mask=inside, other=0)
    if HAS_GRAMMARS:
        place = tl.load(places_ptr + slot).to(tl.int64)
        follows_ptr = masks_cpu_ptr + place * MASK_WORDS + tokens // 32
        words &= tl.load(follows_ptr, mask=inside & (place >= 0) & ~is_late, other=-1)
        words = tl.where(is_late, 0, words)
    is_allowed = ((words >> (tokens % 32)) & 1) != 0
    tl.store(row_ptr + tokens, tl.where(is_allowed, x, float("-inf")), mask=inside)


def adjust_logits(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided; changed in place
    params: SamplingTensors,
    slots: Tensor,  # [num_rows] int32: slot of the row, or -1
    adjustments: AdjustmentTensors,
    token_ids: Tensor,  # [num_rows] int32
    next_positions: Tensor,  # [num_rows] int32
    grammars: GrammarMasks | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Change the logits of rows with a slot and count their last tokens, by the rules of `reference.adjust_logits`."""
    num_rows, vocab = logits.shape
    _check(logits, params, (slots, token_ids, next_positions), adjustments)
    if num_rows == 0:
        return
    if grammars is not None:
        _find_late(slots, next_positions, adjustments, grammars, pdl)
    unused = slots
    _adjust_logits_kernel[(num_rows, triton.cdiv(vocab, CHUNK))](
        logits_ptr=logits,
        slots_ptr=slots,
        token_ids_ptr=token_ids,
        next_positions_ptr=next_positions,
        presence_ptr=params.presence_penalty,
        frequency_ptr=params.frequency_penalty,
        repetition_ptr=params.repetition_penalty,
        counts_ptr=adjustments.counts,
        masks_ptr=adjustments.masks,
        edits_ptr=adjustments.edits,
        num_edits_ptr=adjustments.num_edits,
        places_ptr=adjustments.places,
        masks_cpu_ptr=unused if grammars is None else grammars.masks_cpu,
        are_late_ptr=unused if grammars is None else grammars.are_late,
        words_ptr=adjustments.words,
        num_words_ptr=adjustments.num_words,
        recent_ptr=adjustments.recent,
        logits_stride=logits.stride(0),
        VOCAB=vocab,
        MASK_WORDS=adjustments.masks.shape[1],
        MAX_EDITS=MAX_EDITS,
        EDIT_FIELDS=EDIT_FIELDS,
        MAX_WORDS=MAX_WORDS,
        WORD_TOKENS=WORD_TOKENS,
        CHUNK=CHUNK,
        EDITS=EDITS,
        HAS_GRAMMARS=grammars is not None,
        WORDS=WORDS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _find_late(
    slots: Tensor, next_positions: Tensor, adjustments: AdjustmentTensors, grammars: GrammarMasks, pdl: bool
) -> None:
    num_rows = slots.shape[0]
    _check_grammars(grammars, num_rows, adjustments.masks.shape[1])
    _find_late_kernel[(1,)](
        slots_ptr=slots,
        next_positions_ptr=next_positions,
        places_ptr=adjustments.places,
        positions_cpu_ptr=grammars.positions_cpu,
        are_late_ptr=grammars.are_late,
        num_rows=num_rows,
        ROWS=triton.next_power_of_2(grammars.are_late.shape[0]),  # one binary for all steps of a batch
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _check_grammars(grammars: GrammarMasks, num_rows: int, mask_words: int) -> None:
    masks, positions = grammars.masks_cpu, grammars.positions_cpu
    assert masks.shape == (positions.shape[0], mask_words) and masks.is_contiguous(), "a mask for each place"
    assert masks.dtype == positions.dtype == torch.int32, f"masks of {masks.dtype}: int32 needed"
    assert grammars.are_late.shape[0] >= num_rows, f"{num_rows} rows: made for {grammars.are_late.shape[0]}"
    check_column("are_late", grammars.are_late[:num_rows], num_rows)
    assert not grammars.are_late.is_cuda or masks.is_pinned(), "a GPU reaches pinned memory of the host only"
    assert not grammars.are_late.is_cuda or positions.is_pinned(), "a GPU reaches pinned memory of the host only"


def _check(
    logits: Tensor, params: SamplingTensors, int32_columns: tuple[Tensor, ...], adjustments: AdjustmentTensors
) -> None:
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are fp32 with contiguous rows"
    for column in int32_columns:
        check_column("a column of the rows", column, num_rows)
    for penalty in (params.presence_penalty, params.frequency_penalty, params.repetition_penalty):
        check_column("a penalty", penalty, num_rows, torch.float32)
    num_slots = adjustments.num_edits.shape[0]
    words, edits = (WORD_TOKENS, MAX_WORDS), (EDIT_FIELDS, MAX_EDITS)
    shapes = ((vocab,), (triton.cdiv(vocab, 32),), edits, (), (), words, (), (WORD_TOKENS,))
    for tensor, of_slot in zip(adjustments.columns(), shapes, strict=True):
        shape = (num_slots, *of_slot)
        assert tensor.shape == shape and tensor.is_contiguous(), f"{tuple(tensor.shape)}: contiguous {shape} needed"
        assert tensor.dtype == torch.int32, f"adjustments of {tensor.dtype}: int32 needed"
