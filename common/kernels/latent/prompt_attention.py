"""Causal attention of prompts over expanded keys and values (FlashAttention-2, Dao 2023), gathered by sequence.

A head's key is its own expanded dimensions, then the rotated key that all heads share. Each pair of a query and a key
takes 640 FLOP a head at 192 and 128 dimensions, where latents alone would take 2,176. So expansion pays from about 170
queries on: it takes 262 kFLOP for each key and head. Both are bound by products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import LOG2_E
from common.kernels.base.checks import check_column
from common.kernels.base.gpu import Gpu
from common.kernels.base.latent_operands import LatentWeights, Tiling
from common.kernels.base.ragged import first_tile, max_seqs_for, num_tiles, tile_of
from common.kernels.latent.gather_latents import TILE

LARGE_TILES_BYTES = 150_000  # of shared memory: needed by the larger tiles


def tiling_for(dtype: torch.dtype, max_query_len: int, shared_bytes: int) -> Tiling:
    """Return tiles for a query of 192 dimensions and values of 128 that fit into a program's shared memory.

    Keys divide TILE.
    """
    if dtype == torch.float32:
        return Tiling(queries=32, keys=32, num_warps=4, num_stages=1)
    if shared_bytes < LARGE_TILES_BYTES:
        return Tiling(queries=64, keys=32, num_warps=4, num_stages=2)
    if max_query_len <= 64:
        return Tiling(queries=64, keys=64, num_warps=4, num_stages=2)
    return Tiling(queries=128, keys=64, num_warps=8, num_stages=2)


@triton.jit
def _attend_keys(
    acc,  # [QUERIES, VALUE] fp32, not yet normalized
    row_max,  # [QUERIES] fp32, in units of log2
    row_sum,  # [QUERIES] fp32
    q,  # [QUERIES, NOPE]
    q_turned,  # [QUERIES, ROPE]
    query_positions,  # [QUERIES] int32
    expanded_ptr,  # [num_keys, NOPE + VALUE], of this sequence and head, rows expanded_stride apart
    shared_ptr,  # [num_keys, ROPE], of this sequence, rows shared_stride apart
    expanded_stride,
    shared_stride,
    begin,
    end,
    scale_log2,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys [begin, end) into the running softmax; whole tiles, because rows behind the last key hold zeros."""
    for start in tl.range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        rows = keys.to(tl.int64)[:, None]
        k = tl.load(expanded_ptr + rows * expanded_stride + tl.arange(0, NOPE)[None, :])
        k_turned = tl.load(shared_ptr + rows * shared_stride + tl.arange(0, ROPE)[None, :])
        v = tl.load(expanded_ptr + rows * expanded_stride + NOPE + tl.arange(0, VALUE)[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(k_turned), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] <= query_positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_seqs", "first_head"])
def _latent_prompt_kernel(
    q_ptr,  # [num_tokens, num_heads, NOPE + ROPE], rows q_stride apart
    expanded_ptr,  # [num_rows, heads of this launch, NOPE + VALUE], contiguous
    entries_ptr,  # [num_rows, RANK + ROPE], contiguous
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_tokens, num_heads, VALUE], contiguous
    scale_log2,  # softmax scale times log2(e)
    num_seqs,
    first_head,  # of this launch
    q_stride,
    expanded_stride,
    out_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (query tiles, heads of this launch). A program takes a query tile of a head, longest contexts first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seqs = tl.arange(0, MAX_SEQS)
    seq, token, token_end, first_token = tile_of(tile, cu_seqlens_ptr, seqs, num_seqs, QUERIES)
    query_len, first_query = token_end - token, first_token - token
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    prior = seq_len - query_len
    keys_before = tl.sum(tl.load(seq_lens_ptr + seqs, mask=seqs < seq, other=0), axis=0)
    first_row = (first_tile(keys_before, seq, TILE) * TILE).to(tl.int64)
    queries = first_query + tl.arange(0, QUERIES)
    present = (queries < query_len)[:, None]
    tokens = (token + queries).to(tl.int64)[:, None]
    q_ptrs = q_ptr + tokens * q_stride + (first_head + head) * (NOPE + ROPE)
    q = tl.load(q_ptrs + tl.arange(0, NOPE)[None, :], mask=present, other=0.0)
    q_turned = tl.load(q_ptrs + NOPE + tl.arange(0, ROPE)[None, :], mask=present, other=0.0)

    expanded_ptr += first_row * expanded_stride + head * (NOPE + VALUE)
    shared_ptr = entries_ptr + first_row * (RANK + ROPE) + RANK
    positions = prior + queries
    unmasked_end = tl.maximum(prior + first_query + 1, 0) // KEYS * KEYS
    end = tl.minimum(seq_len, prior + first_query + QUERIES)
    acc = tl.zeros((QUERIES, VALUE), tl.float32)
    row_max = tl.full((QUERIES,), float("-inf"), tl.float32)
    row_sum = tl.zeros((QUERIES,), tl.float32)
    acc, row_max, row_sum = _attend_keys(
        acc, row_max, row_sum, q, q_turned, positions, expanded_ptr, shared_ptr, expanded_stride, RANK + ROPE,
        0, unmasked_end, scale_log2, NOPE, ROPE, VALUE, KEYS, MASKED=False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_keys(
        acc, row_max, row_sum, q, q_turned, positions, expanded_ptr, shared_ptr, expanded_stride, RANK + ROPE,
        unmasked_end, end, scale_log2, NOPE, ROPE, VALUE, KEYS, MASKED=True,
    )  # fmt: skip
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # a sequence of length 0 gives zeros
    out_ptrs = out_ptr + tokens * out_stride + (first_head + head) * VALUE + tl.arange(0, VALUE)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=present)


def latent_prompt_attention(
    q: Tensor,  # [num_tokens, num_heads, query_dim], rotated; rows may be strided
    entries: Tensor,  # [num_rows, rank + rope_dim], of `gather_latents`
    expanded: Tensor,  # [num_rows, some heads, nope_dim + value_dim], contiguous: keys and values
    weights: LatentWeights,
    cu_seqlens: Tensor,  # [num_seqs + 1] int32
    seq_lens: Tensor,  # [num_seqs] int32, each at least its number of queries
    max_query_len: int,
    gpu: Gpu,
    *,
    out: Tensor,  # [num_tokens, num_heads, value_dim], contiguous
    first_head: int,  # of those expanded
) -> None:
    """Attend from query i to the first `seq_len - query_len + i + 1` keys, for the heads that are expanded."""
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    check_column("cu_seqlens", cu_seqlens, num_seqs + 1)
    check_column("seq_lens", seq_lens, num_seqs)
    assert q.stride()[1:] == (weights.query_dim, 1), f"q strides {q.stride()}: contiguous heads needed"
    assert entries.is_contiguous() and expanded.is_contiguous() and out.is_contiguous(), "contiguous operands needed"
    if num_tokens == 0 or num_seqs == 0:
        return
    tiling = tiling_for(q.dtype, max_query_len, gpu.shared_bytes)
    _latent_prompt_kernel[(num_tiles(num_tokens, num_seqs, tiling.queries), expanded.shape[1])](
        q_ptr=q,
        expanded_ptr=expanded,
        entries_ptr=entries,
        cu_seqlens_ptr=cu_seqlens,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        scale_log2=weights.scale * LOG2_E,
        num_seqs=num_seqs,
        first_head=first_head,
        q_stride=q.stride(0),
        expanded_stride=expanded.stride(0),
        out_stride=out.stride(0),
        NOPE=weights.nope_dim,
        ROPE=weights.rope_dim,
        RANK=weights.rank,
        VALUE=weights.value_dim,
        MAX_SEQS=max_seqs_for(num_seqs),
        QUERIES=tiling.queries,
        KEYS=tiling.keys,
        TILE=TILE,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
