"""What requests ask to be changed of their logits before a token is chosen: penalties, biases and bans.

One launch for the rows of a step that have something to change; the programs of other rows leave at once. What is
changed by lies in slots, which stay where they are when rows move. How often a token has occurred is counted here,
too: a step's input is the token chosen last, so the program that changes its logit counts it first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels import operands
from common.kernels.checks import check_column
from common.kernels.operands import EDIT_FIELDS, MAX_EDITS, AdjustmentTensors, SamplingTensors
from common.kernels.pdl import wait_for_predecessor

CHUNK = 1024  # logits of one program
EDITS = 128  # edits that a program looks at at once
IN_PROMPT = tl.constexpr(operands.IN_PROMPT)


@triton.jit
def _load_edits(edits_ptr, begin, num_edits, first, end, MAX_EDITS: tl.constexpr, EDITS: tl.constexpr):
    """Tokens, values and ends of the edits from `begin` on, and which of them are of tokens from `first` to `end`."""
    edits = begin + tl.arange(0, EDITS)
    present = edits < num_edits
    tokens = tl.load(edits_ptr + edits, mask=present, other=-1)
    values = tl.load(edits_ptr + MAX_EDITS + edits, mask=present, other=0).to(tl.float32, bitcast=True)
    ends = tl.load(edits_ptr + 2 * MAX_EDITS + edits, mask=present, other=0)
    return tokens, values, ends, (tokens >= first) & (tokens < end)


@triton.jit
def _adjust_logits_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    slots_ptr,  # [num_rows] int32: -1 for rows that stay as they are
    token_ids_ptr,  # [num_rows] int32: the last token, not counted yet; -1 if all are
    next_positions_ptr,  # [num_rows] int32: of the token to be chosen
    presence_ptr,  # [num_rows] fp32
    frequency_ptr,  # [num_rows] fp32
    repetition_ptr,  # [num_rows] fp32
    counts_ptr,  # [num_slots, VOCAB] int32
    masks_ptr,  # [num_slots, MASK_WORDS] int32
    edits_ptr,  # [num_slots, 3, MAX_EDITS] int32
    num_edits_ptr,  # [num_slots] int32
    logits_stride,
    VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    MAX_EDITS: tl.constexpr,
    EDIT_FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
    EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, cdiv(VOCAB, CHUNK)). One program a chunk of a row: biases, bans, then penalties and the mask."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    wait_for_predecessor(PDL)
    if slot < 0:
        return
    first = tl.program_id(1) * CHUNK
    end = tl.minimum(first + CHUNK, VOCAB)
    row_ptr = logits_ptr + row * logits_stride
    next_position = tl.load(next_positions_ptr + row)
    edits_ptr += slot * EDIT_FIELDS * MAX_EDITS
    num_edits = tl.load(num_edits_ptr + slot)
    for begin in tl.range(0, num_edits, EDITS):  # a token has one bias, so nothing is added to twice
        edited, values, _, is_here = _load_edits(edits_ptr, begin, num_edits, first, end, MAX_EDITS, EDITS)
        is_here &= values > float("-inf")
        tl.store(row_ptr + edited, tl.load(row_ptr + edited, mask=is_here) + values, mask=is_here)
    tl.debug_barrier()  # a token may be biased and banned
    for begin in tl.range(0, num_edits, EDITS):
        edited, values, ends, is_here = _load_edits(edits_ptr, begin, num_edits, first, end, MAX_EDITS, EDITS)
        is_here &= (values == float("-inf")) & (next_position < ends)
        tl.store(row_ptr + edited, values, mask=is_here)
    tl.debug_barrier()  # what one thread has stored another one loads

    tokens = first + tl.arange(0, CHUNK)
    inside = tokens < VOCAB
    count_ptr = counts_ptr + slot * VOCAB + tokens
    is_last = inside & (tokens == tl.load(token_ids_ptr + row))
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
    is_allowed = ((words >> (tokens % 32)) & 1) != 0
    tl.store(row_ptr + tokens, tl.where(is_allowed, x, float("-inf")), mask=inside)


def adjust_logits(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided; changed in place
    params: SamplingTensors,
    slots: Tensor,  # [num_rows] int32: each row's own, or -1
    adjustments: AdjustmentTensors,
    token_ids: Tensor,  # [num_rows] int32
    next_positions: Tensor,  # [num_rows] int32
    *,
    pdl: bool = False,
) -> None:
    """Change the logits of the rows that have a slot and count their last tokens, as `reference.adjust_logits` does."""
    num_rows, vocab = logits.shape
    _check(logits, params, (slots, token_ids, next_positions), adjustments)
    if num_rows == 0:
        return
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
        logits_stride=logits.stride(0),
        VOCAB=vocab,
        MASK_WORDS=adjustments.masks.shape[1],
        MAX_EDITS=MAX_EDITS,
        EDIT_FIELDS=EDIT_FIELDS,
        CHUNK=CHUNK,
        EDITS=EDITS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


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
    check_column("num_edits", adjustments.num_edits, num_slots)
    shapes = ((num_slots, vocab), (num_slots, triton.cdiv(vocab, 32)), (num_slots, EDIT_FIELDS, MAX_EDITS))
    for tensor, shape in zip((adjustments.counts, adjustments.masks, adjustments.edits), shapes, strict=True):
        assert tensor.shape == shape and tensor.is_contiguous(), f"{tuple(tensor.shape)}: contiguous {shape} needed"
        assert tensor.dtype == torch.int32, f"adjustments of {tensor.dtype}: int32 needed"
