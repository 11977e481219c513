"""Causal attention of ragged prompt chunks over their blocks (FlashAttention-2, Dao 2023, on a paged cache).

Query tiles of all sequences lie on one grid axis (`ragged`). Keys seen by every query of a tile are walked without
masks; only the last tiles, at the diagonal, are masked. With a window, the first tiles are masked, too, and tiles out
of sight are skipped.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import LOG2_E, NO_KEYS, SINK_UNITS
from common.kernels.base.attention_operands import PromptOperands
from common.kernels.base.checks import check_prompts
from common.kernels.base.e4m3 import as_factor, is_e4m3, widened
from common.kernels.base.gpu import Gpu
from common.kernels.base.ragged import max_seqs_for, num_tiles, tile_of

LARGE_TILES_BYTES = 150_000  # of shared memory: needed by the larger tiles for heads of 256
HUGE_TILES_BYTES = 200_000  # of shared memory: needed by the larger tiles for heads of 512


@triton.jit
def attend_keys(
    acc,  # [BLOCK_M, HEAD_DIM] fp32, not yet normalized
    row_max,  # [BLOCK_M] fp32, in units of log2
    row_sum,  # [BLOCK_M] fp32
    q,  # [BLOCK_M, HEAD_DIM], of the type in which keys and values are multiplied
    query_positions,  # [BLOCK_M] int32
    table_ptr,  # [max_blocks] int32, of this sequence
    k_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided, at this KV head
    v_ptr,  # as k_ptr
    stride_block,
    stride_token,
    begin,
    end,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr = 0,
    first_key=0,  # keys before are out of every query's sight; only if MASKED and WINDOW
):
    """Fold keys [begin, end) into the running softmax; `begin` is a multiple of BLOCK_N, so is `end` unless MASKED."""
    columns = tl.arange(0, HEAD_DIM)[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = keys < end
            if WINDOW > 0:
                inside = inside & (keys >= first_key)
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            elements = (blocks * stride_block + (keys % BLOCK_SIZE) * stride_token)[:, None] + columns
            k = tl.load(k_ptr + elements, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + elements, mask=inside[:, None], other=0.0)
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
            elements = (blocks * stride_block + (keys % BLOCK_SIZE) * stride_token)[:, None] + columns
            k = tl.load(k_ptr + elements)
            v = tl.load(v_ptr + elements)
        k = widened(k, q.dtype)
        v = widened(v, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = keys[None, :] <= query_positions[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > query_positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # both differ from batch to batch
def _prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_q, head_dim], contiguous
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # as k_cache_ptr
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [NUM_Q] fp32, or None
    out_ptr,  # [num_tokens, num_q, head_dim], contiguous
    scale_log2,  # softmax scale times log2(e)
    v_scale,  # of values in an e4m3 cache, or None
    num_seqs,
    table_stride,
    stride_block,  # of both caches, in elements, as are stride_token and stride_head
    stride_token,
    stride_head,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    BLOCK_M: tl.constexpr,  # queries of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
    WINDOW: tl.constexpr,
):
    """Grid: (query tiles, NUM_Q). A program takes a query tile of a head, longest contexts first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seq, token, token_end, first_token = tile_of(tile, cu_seqlens_ptr, tl.arange(0, MAX_SEQS), num_seqs, BLOCK_M)
    query_len, first_query = token_end - token, first_token - token
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    prior = seq_len - query_len
    queries = first_query + tl.arange(0, BLOCK_M)
    rows = (token + queries).to(tl.int64)[:, None] * (NUM_Q * HEAD_DIM) + head * HEAD_DIM
    elements = rows + tl.arange(0, HEAD_DIM)[None, :]
    present = (queries < query_len)[:, None]
    q = as_factor(tl.load(q_ptr + elements, mask=present, other=0.0), k_cache_ptr.dtype.element_ty)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    k_ptr = k_cache_ptr + (head // GROUP) * stride_head
    v_ptr = v_cache_ptr + (head // GROUP) * stride_head
    positions = prior + queries
    unmasked_end = tl.maximum(prior + first_query + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(seq_len, prior + first_query + BLOCK_M)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if WINDOW > 0:
        row_max = tl.full((BLOCK_M,), NO_KEYS, tl.float32)  # finite, because a query may see no key of the first tile
    if sinks_ptr is not None:  # a part without values
        row_max = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head) * SINK_UNITS
        row_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    begin = 0
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(prior + first_query + 1 - WINDOW, 0)
        first_of_all = tl.maximum(prior + first_query + BLOCK_M - WINDOW, 0)  # seen by every query
        begin = tl.minimum(tl.cdiv(first_of_all, BLOCK_N) * BLOCK_N, unmasked_end)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, positions, table_ptr, k_ptr, v_ptr, stride_block, stride_token,
            first_key // BLOCK_N * BLOCK_N, begin, scale_log2,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True, WINDOW=WINDOW, first_key=first_key,
        )  # fmt: skip
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, positions, table_ptr, k_ptr, v_ptr, stride_block, stride_token,
        begin, unmasked_end, scale_log2, HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, positions, table_ptr, k_ptr, v_ptr, stride_block, stride_token,
        unmasked_end, end, scale_log2,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True, WINDOW=WINDOW, first_key=first_key,
    )  # fmt: skip
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # a sequence of length 0 gives zeros
    if v_scale is not None:
        out = out * v_scale
    tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=present)


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program's work, with its warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, head_dim: int, max_query_len: int, shared_bytes: int) -> Tile:
    """Return tiles for Hopper, or smaller tiles if a program's shared memory is too small.

    On Hopper, a warp group's matrix unit takes 64 rows. fp32 serves comparison only; its tiles are small.
    """
    if dtype == torch.float32:
        return Tile(block_m=32, block_n=32 if head_dim <= 256 else 16, num_warps=4, num_stages=1)
    if head_dim > 256:
        has_some, has_all = shared_bytes >= LARGE_TILES_BYTES, shared_bytes >= HUGE_TILES_BYTES
        return Tile(block_m=64, block_n=32 if has_some else 16, num_warps=8, num_stages=2 if has_all else 1)
    if head_dim > 128 and shared_bytes < LARGE_TILES_BYTES:
        return Tile(block_m=64, block_n=32, num_warps=4, num_stages=2)
    if max_query_len <= 64:
        return Tile(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return Tile(block_m=128, block_n=64 if head_dim > 128 else 128, num_warps=8, num_stages=2)


def prefill_attention(prompts: PromptOperands, max_query_len: int, gpu: Gpu) -> Tensor:
    """Attend from every query: `[num_tokens, num_q_heads, head_dim]`."""
    check_prompts(prompts)
    q, k_cache, v_cache = prompts.q, prompts.k_cache, prompts.v_cache
    num_tokens, num_q, head_dim = q.shape
    num_seqs, num_kv = prompts.seq_lens.shape[0], k_cache.shape[2]
    out = torch.empty_like(q)
    if num_tokens == 0 or num_seqs == 0:
        return out
    tile = tile_for(q.dtype, head_dim, max_query_len, gpu.shared_bytes)
    _prefill_attention_kernel[(num_tiles(num_tokens, num_seqs, tile.block_m), num_q)](
        q_ptr=q,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=prompts.block_tables,
        cu_seqlens_ptr=prompts.cu_seqlens,
        seq_lens_ptr=prompts.seq_lens,
        sinks_ptr=prompts.sinks,
        out_ptr=out,
        scale_log2=prompts.scale * LOG2_E,
        v_scale=prompts.v_scale if is_e4m3(v_cache) else None,
        num_seqs=num_seqs,
        table_stride=prompts.block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        NUM_Q=num_q,
        GROUP=num_q // num_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        MAX_SEQS=max_seqs_for(num_seqs),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WINDOW=prompts.window,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
