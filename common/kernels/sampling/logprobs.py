"""Log-probabilities of a row's chosen token and of the likeliest tokens, where a row asks.

Two kernels run behind the sampler. The first reduces each part of a row to the largest logit and a sum. In the second,
a program for each row picks the largest logit of all, as often as asked for. After each pick, only the part with the
picked logit is searched again. Ties go to the lowest id, and sums do not depend on the rest of the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base import sampling_operands
from common.kernels.base.checks import check_column
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.base.sampling_operands import LogprobRing
from common.kernels.sampling.filter_values import load_logits

PART = 1024  # logits of one program
LOGPROB_WORDS = tl.constexpr(sampling_operands.LOGPROB_WORDS)
MAX_ENTRIES = tl.constexpr(sampling_operands.MAX_LOGPROBS + 1)


@triton.jit
def _reduce_parts_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    num_wanted_ptr,  # [num_rows] int32
    largest_ptr,  # [num_rows, NUM_PARTS] fp32
    largest_ids_ptr,  # [num_rows, NUM_PARTS] int32
    sums_ptr,  # [num_rows, NUM_PARTS] fp32: of exp(logit - largest)
    logits_stride,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, NUM_PARTS)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_wanted = tl.load(num_wanted_ptr + row)
    wait_for_predecessor(PDL)
    if num_wanted == 0:
        return
    x = load_logits(logits_ptr + row * logits_stride, part * PART + tl.arange(0, PART), VOCAB)
    largest, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row * NUM_PARTS + part
    tl.store(largest_ptr + place, largest)
    tl.store(largest_ids_ptr + place, part * PART + index)
    tl.store(sums_ptr + place, tl.sum(tl.where(x > float("-inf"), tl.exp(x - largest), 0.0), axis=0))


@triton.jit
def _logprob(x, log_total):
    """Return `x - log_total`, with NaN replaced by -inf."""
    logprob = x - log_total
    return tl.where(logprob == logprob, logprob, float("-inf"))


@triton.jit
def _store_entry(entry_ptr, token, logprob, mask):
    tl.store(entry_ptr, token, mask=mask)
    tl.store(entry_ptr + MAX_ENTRIES, logprob.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _pick_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    num_wanted_ptr,  # [num_rows] int32
    tokens_ptr,  # [num_rows] int32: chosen
    largest_ptr,  # [num_rows, NUM_PARTS] fp32
    largest_ids_ptr,  # [num_rows, NUM_PARTS] int32
    sums_ptr,  # [num_rows, NUM_PARTS] fp32
    words_ptr,  # [num_rows, RING_SLOTS, LOGPROB_WORDS] int32, host memory if there is a ring
    turns_ptr,  # [num_rows] int32, if there is a ring: slot behind the slot of the token just stored
    logits_stride,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least NUM_PARTS
    RING_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows,). Tokens of probability 0 are not listed."""
    row = tl.program_id(0).to(tl.int64)
    num_wanted = tl.load(num_wanted_ptr + row)
    wait_for_predecessor(PDL)
    slot = 0
    if RING_SLOTS > 1:
        slot = (tl.load(turns_ptr + row) + RING_SLOTS - 1) % RING_SLOTS
    words_ptr += (row * RING_SLOTS + slot) * LOGPROB_WORDS
    if num_wanted == 0:
        tl.store(words_ptr, 0)
        return
    row_ptr = logits_ptr + row * logits_stride
    parts = tl.arange(0, PARTS)
    present = parts < NUM_PARTS
    largest = tl.load(largest_ptr + row * NUM_PARTS + parts, mask=present, other=float("-inf"))
    ids = tl.load(largest_ids_ptr + row * NUM_PARTS + parts, mask=present, other=0)
    sums = tl.load(sums_ptr + row * NUM_PARTS + parts, mask=present, other=0.0)
    top = tl.max(largest, axis=0)
    weights = tl.where(largest > float("-inf"), sums * tl.exp(largest - top), 0.0)
    log_total = top + tl.log(tl.sum(weights, axis=0))
    chosen = tl.maximum(tl.load(tokens_ptr + row), 0)
    _store_entry(words_ptr + 1, chosen, _logprob(load_logits(row_ptr, chosen, VOCAB), log_total), True)
    num_found = tl.full((), 1, tl.int32)
    for _ in tl.range(1, num_wanted):
        best, part = tl.max(largest, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.sum(tl.where(parts == part, ids, 0), axis=0)
        is_found = best > float("-inf")
        _store_entry(words_ptr + 1 + num_found, token, _logprob(best, log_total), is_found)
        num_found += is_found.to(tl.int32)
        tokens = part * PART + tl.arange(0, PART)
        x = load_logits(row_ptr, tokens, VOCAB)
        x = tl.where((x < best) | ((x == best) & (tokens > token)), x, float("-inf"))
        following, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        largest = tl.where(parts == part, following, largest)
        ids = tl.where(parts == part, part * PART + index, ids)
    tl.store(words_ptr, num_found)


def logprobs(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    num_wanted: Tensor,  # [num_rows] int32
    tokens: Tensor,  # [num_rows] int32: chosen
    *,
    pdl: bool = False,
) -> Tensor:
    """Return words of each row by the rules of `reference.logprobs`: `[num_rows, LOGPROB_WORDS]` int32."""
    num_rows = logits.shape[0]
    words = torch.empty((num_rows, sampling_operands.LOGPROB_WORDS), dtype=torch.int32, device=logits.device)
    _launch(logits, num_wanted, tokens, words, None, pdl)
    return words


def land_logprobs(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    num_wanted: Tensor,  # [num_rows] int32
    tokens: Tensor,  # [num_rows] int32: chosen, and stored by the kernel before
    ring: LogprobRing,
    *,
    pdl: bool = False,
) -> None:
    """Leave the result of `logprobs` where the host finds it, beside the tokens of the same step."""
    words_cpu, turns = ring.words_cpu, ring.turns
    assert words_cpu.shape[::2] == (turns.shape[0], sampling_operands.LOGPROB_WORDS) and words_cpu.is_contiguous()
    assert not turns.is_cuda or words_cpu.is_pinned(), "a GPU reaches pinned memory of the host only"
    assert logits.shape[0] <= turns.shape[0], f"{logits.shape[0]} rows: the ring has {turns.shape[0]}"
    _launch(logits, num_wanted, tokens, words_cpu, turns, pdl)


def _launch(logits: Tensor, num_wanted: Tensor, tokens: Tensor, words: Tensor, turns: Tensor | None, pdl: bool) -> None:
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are fp32 with contiguous rows"
    check_column("num_logprobs", num_wanted, num_rows)
    check_column("tokens", tokens, num_rows)
    if num_rows == 0:
        return
    num_parts = triton.cdiv(vocab, PART)
    largest = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids, sums = torch.empty_like(largest, dtype=torch.int32), torch.empty_like(largest)
    shared = {
        "logits_ptr": logits,
        "num_wanted_ptr": num_wanted,
        "largest_ptr": largest,
        "largest_ids_ptr": ids,
        "sums_ptr": sums,
        "logits_stride": logits.stride(0),
        "VOCAB": vocab,
        "PART": PART,
        "NUM_PARTS": num_parts,
        "PDL": pdl,
        "num_warps": 4,
        "launch_pdl": pdl,
    }
    _reduce_parts_kernel[(num_rows, num_parts)](**shared)
    _pick_kernel[(num_rows,)](
        tokens_ptr=tokens,
        words_ptr=words,
        turns_ptr=tokens if turns is None else turns,
        PARTS=triton.next_power_of_2(num_parts),
        RING_SLOTS=1 if turns is None else words.shape[1],
        **shared,
    )
