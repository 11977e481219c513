"""The next token of every row, without a sort and without the host (Gumbel-max trick).

Three kernels: the smallest logit that passes the filters, by bisection; the best token of each chunk
of the vocabulary; the best of the chunks. Rows without filters leave the first one at once.

A filter is a limit on the weight of likelier tokens: top-k on their number, top-p on their
probability. Either weight falls as the threshold rises, so the smallest threshold below the limit is
found by halving a range of integers: fp32 in the order of its values. The result is exact, and
tokens that tie with the last one kept are kept as well.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.base import SamplingTensors

THRESHOLD_BLOCK = 8192  # logits a pass takes at once
CHUNK = 1024  # logits of one program in the choice


@triton.jit
def _order(x):
    """fp32 as int32 of the same order: monotone, its own inverse on the bits, -0 as +0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load_scaled(row_ptr, tokens, VOCAB: tl.constexpr, temperature):
    """Logits over temperature; NaN and what is past the vocabulary read as -inf."""
    x = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf"))
    return tl.div_rn(tl.where(x == x, x, float("-inf")), temperature)


@triton.jit
def _weight_above(row_ptr, threshold, top, temperature, MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens whose order exceeds `threshold`: their mass relative to the top token, or their number (fp32, exact)."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        x = _load_scaled(row_ptr, start + tl.arange(0, BLOCK), VOCAB, temperature)
        above = _order(x) > threshold.to(tl.int32)
        if MASS:
            total += tl.where(above, tl.exp(x - top), 0.0)
        else:
            total += tl.where(above, 1.0, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _lowest_within(
    row_ptr, low, high, limit, top, temperature, MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Smallest order in [low, high] above which less than `limit` weighs; `high` if none. int64, so no overflow."""
    while low < high:
        middle = (low + high) >> 1
        if _weight_above(row_ptr, middle, top, temperature, MASS, VOCAB, BLOCK) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _threshold_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32, 0 is off
    top_p_ptr,  # [num_rows] fp32, 1 is off
    min_p_ptr,  # [num_rows] fp32, 0 is off
    threshold_ptr,  # [num_rows] fp32, of scaled logits
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows,). One program a row, whose logits are in L2 after the first pass."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    by_k = (top_k > 0) & (top_k < VOCAB)
    if (temperature <= 0.0) | ((top_p >= 1.0) & (min_p <= 0.0) & (by_k == 0)):
        tl.store(threshold_ptr + row, float("-inf"))
        return

    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        tops = tl.maximum(tops, _load_scaled(row_ptr, start + tl.arange(0, BLOCK), VOCAB, temperature))
    top = tl.max(tops, axis=0)
    low = _order(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = _order(top).to(tl.int64)
    if by_k:
        low = _lowest_within(row_ptr, low, high, top_k.to(tl.float32), top, temperature, False, VOCAB, BLOCK)
    if top_p < 1.0:
        total = _weight_above(row_ptr, low - 1, top, temperature, True, VOCAB, BLOCK)
        low = _lowest_within(row_ptr, low, high, top_p * total, top, temperature, True, VOCAB, BLOCK)
    bits = tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.int32)
    threshold = bits.to(tl.float32, bitcast=True)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _gumbel(seed, position, tokens):
    """Standard Gumbel noise of `tokens`, keyed on (seed, position): bits of Philox 4x32-10 as in the reference."""
    key_low, key_high, _, _ = tl.philox(seed, position.to(tl.uint32), 0, 0, 0)
    key = (key_high.to(tl.uint64) << 32) | key_low.to(tl.uint64)
    bits, _, _, _ = tl.philox(key, tokens.to(tl.uint32), 0, 0, 0)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _choose_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    seed_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int32
    threshold_ptr,  # [num_rows] fp32
    best_ptr,  # [num_rows, num_chunks] fp32
    best_ids_ptr,  # [num_rows, num_chunks] int32
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (num_rows, cdiv(VOCAB, CHUNK)). One program the best token of a chunk; ties to the lowest id."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    temperature = tl.load(temperature_ptr + row)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    if temperature > 0.0:
        scaled = _load_scaled(row_ptr, tokens, VOCAB, temperature)
        noisy = scaled + _gumbel(tl.load(seed_ptr + row), tl.load(positions_ptr + row), tokens)
        scores = tl.where(scaled >= tl.load(threshold_ptr + row), noisy, float("-inf"))
    else:
        scores = _load_scaled(row_ptr, tokens, VOCAB, 1.0)
    best, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row.to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(best_ptr + place, best)
    tl.store(best_ids_ptr + place, chunk * CHUNK + index)


@triton.jit
def _best_chunk_kernel(
    best_ptr,  # [num_rows, num_chunks] fp32
    best_ids_ptr,  # [num_rows, num_chunks] int32
    tokens_ptr,  # [num_rows] int32
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least NUM_CHUNKS
):
    """Grid: (num_rows,). One program a row; ties to the lowest id, since chunks are in order."""
    row = tl.program_id(0)
    place = row.to(tl.int64) * NUM_CHUNKS
    chunks = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + place + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
    _, index = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tokens_ptr + row, tl.load(best_ids_ptr + place + index))


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """What the kernels hand to one another."""

    threshold: Tensor  # [max_rows] fp32
    best: Tensor  # [max_rows, num_chunks] fp32
    best_ids: Tensor  # [max_rows, num_chunks] int32


def make_workspace(max_rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
    """Room for `max_rows` rows of `vocab` logits."""
    shape = (max_rows, triton.cdiv(vocab, CHUNK))
    return SamplingWorkspace(
        threshold=torch.empty((max_rows,), dtype=torch.float32, device=device),
        best=torch.empty(shape, dtype=torch.float32, device=device),
        best_ids=torch.empty(shape, dtype=torch.int32, device=device),
    )


def sample(
    logits: Tensor,  # [num_rows, vocab] fp32, rows may be strided
    params: SamplingTensors,
    positions: Tensor,  # [num_rows] int32
    workspace: SamplingWorkspace,
) -> Tensor:
    """The token of each row, by the rules of `reference.sample`: `[num_rows]` int32, always within the vocabulary."""
    _check(logits, params, positions, workspace)
    num_rows, vocab = logits.shape
    tokens = torch.empty((num_rows,), dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return tokens
    num_chunks = triton.cdiv(vocab, CHUNK)
    _threshold_kernel[(num_rows,)](
        logits_ptr=logits,
        temperature_ptr=params.temperature,
        top_k_ptr=params.top_k,
        top_p_ptr=params.top_p,
        min_p_ptr=params.min_p,
        threshold_ptr=workspace.threshold,
        logits_stride=logits.stride(0),
        VOCAB=vocab,
        BLOCK=THRESHOLD_BLOCK,
        num_warps=16,
    )
    _choose_kernel[(num_rows, num_chunks)](
        logits_ptr=logits,
        temperature_ptr=params.temperature,
        seed_ptr=params.seed,
        positions_ptr=positions,
        threshold_ptr=workspace.threshold,
        best_ptr=workspace.best,
        best_ids_ptr=workspace.best_ids,
        logits_stride=logits.stride(0),
        VOCAB=vocab,
        CHUNK=CHUNK,
        num_warps=4,
    )
    _best_chunk_kernel[(num_rows,)](
        best_ptr=workspace.best,
        best_ids_ptr=workspace.best_ids,
        tokens_ptr=tokens,
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return tokens


def _check(logits: Tensor, params: SamplingTensors, positions: Tensor, workspace: SamplingWorkspace) -> None:
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are fp32 with contiguous rows"
    assert vocab <= 1 << 24, f"vocabulary of {vocab}: tokens are counted in fp32, exact to 2^24"
    columns = (
        (params.temperature, torch.float32),
        (params.top_k, torch.int32),
        (params.top_p, torch.float32),
        (params.min_p, torch.float32),
        (params.seed, torch.int64),
        (positions, torch.int32),
    )
    for column, dtype in columns:
        assert column.shape == (num_rows,) and column.is_contiguous(), f"{tuple(column.shape)}: {num_rows} rows needed"
        assert column.dtype == dtype, f"a sampling column is {column.dtype}: {dtype} needed"
    assert num_rows <= workspace.threshold.shape[0], f"{num_rows} rows: the workspace holds fewer"
    assert workspace.best.shape[1] == triton.cdiv(vocab, CHUNK), f"vocabulary of {vocab}: made for another"
