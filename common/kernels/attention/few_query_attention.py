"""Causal attention of few queries over contexts of any length, which are cut to fill the GPU.

For prompt steps with all but the last tokens already cached. All query heads of a KV head share a tile with some
queries of a sequence, so K and V are read once. Every program computes the number of each context's parts from all
lengths. The parts are to the programs running at once as the context is to the step's work.

Each part has a softmax of its own; the last program of a tile to end joins the parts, from first to last. Short
contexts, as of prompts that begin, or a context among many, have a single part, whose program writes the output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import LOG2_E, NO_KEYS, SINK_UNITS, joined_units, output_of
from common.kernels.attention.prefill_attention import attend_keys, tile_for
from common.kernels.attention.query_parts import TILE_ROWS, QueryParts, tokens_of_tile
from common.kernels.base.attention_operands import PromptOperands
from common.kernels.base.checks import check_prompts
from common.kernels.base.e4m3 import as_factor, is_e4m3
from common.kernels.base.gpu import Gpu
from common.kernels.base.last_program import is_last
from common.kernels.base.ragged import first_seen, max_seqs_for, num_tiles

PART_UNIT = 64  # keys: parts begin at multiples of PART_UNIT, itself a multiple of every tile's keys
MIN_PART_KEYS = 256  # joining a part takes about as long as walking a tile or two
MAX_PARTS = 16  # of a context: one program reads all of them back
JOIN_ROWS = 16  # rows joined at once


@triton.jit
def _parts_of(
    seq_len,  # keys from the first seen on
    total_keys,  # of all tiles of the step
    ALL_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MIN_PART_KEYS: tl.constexpr,
    PART_UNIT: tl.constexpr,
):
    """Return the number of parts of a context, and the keys of each part but the last, as numbers or tensors.

    Over all tiles there are at most tiles + ALL_PARTS parts. Tiles with several parts have at most ALL_PARTS in all.
    """
    share = ALL_PARTS * seq_len // total_keys
    wanted = tl.maximum(tl.minimum(tl.minimum(share, seq_len // MIN_PART_KEYS), MAX_PARTS), 1)
    part_keys = tl.maximum(tl.cdiv(tl.cdiv(seq_len, wanted), PART_UNIT), 1) * PART_UNIT
    return tl.maximum(tl.cdiv(seq_len, part_keys), 1), part_keys


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # both differ from batch to batch
def _few_query_attention_kernel(
    q_ptr,  # [num_tokens, num_q, head_dim], contiguous
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # as k_cache_ptr
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [NUM_KV * GROUP] fp32, or None
    out_ptr,  # [num_tokens, num_q, head_dim], contiguous
    partial_ptr,  # [ALL_PARTS, NUM_KV, TILE_ROWS, head_dim] fp32, of `QueryParts`
    maxima_ptr,  # [ALL_PARTS, NUM_KV, TILE_ROWS] fp32, of `QueryParts`
    sums_ptr,  # [ALL_PARTS, NUM_KV, TILE_ROWS] fp32, of `QueryParts`
    arrivals_ptr,  # [ALL_PARTS, NUM_KV] int32, of `QueryParts`
    scale_log2,  # softmax scale times log2(e)
    v_scale,  # of values in an e4m3 cache, or None
    num_seqs,
    table_stride,
    stride_block,  # of both caches, in elements, as are stride_token and stride_head
    stride_token,
    stride_head,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # power of two, at least GROUP
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    BLOCK_M: tl.constexpr,  # rows of a tile: queries times HEADS
    BLOCK_N: tl.constexpr,  # keys of a tile
    TILE_ROWS: tl.constexpr,  # BLOCK_M or more
    ALL_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MIN_PART_KEYS: tl.constexpr,
    PART_UNIT: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: (NUM_KV, tiles + ALL_PARTS). A program takes a part of a tile; programs without work come last."""
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    seqs = tl.arange(0, MAX_SEQS)
    exist = seqs < num_seqs
    begins = tl.load(cu_seqlens_ptr + seqs, mask=exist, other=0)
    ends = tl.load(cu_seqlens_ptr + seqs + 1, mask=exist, other=0)
    lens = tl.load(seq_lens_ptr + seqs, mask=exist, other=0)
    lens -= first_seen(lens, ends - begins, WINDOW) // PART_UNIT * PART_UNIT
    tiles = tl.cdiv(ends - begins, TOKENS)
    total_keys = tl.maximum(tl.sum(tiles * lens, axis=0), 1)
    parts, _ = _parts_of(lens, total_keys, ALL_PARTS, MAX_PARTS, MIN_PART_KEYS, PART_UNIT)
    items = tiles * parts
    precede = tl.cumsum(items, axis=0) <= item  # all items of the sequence come before
    seq = tl.sum(precede.to(tl.int32), axis=0)
    if seq >= num_seqs:
        return

    token = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    seq_tiles = tl.cdiv(query_len, TOKENS)
    first_of_seq = first_seen(seq_len, query_len, WINDOW) // PART_UNIT * PART_UNIT  # where the first part begins
    seq_parts, part_keys = _parts_of(seq_len - first_of_seq, total_keys, ALL_PARTS, MAX_PARTS, MIN_PART_KEYS, PART_UNIT)
    own_item = item - tl.sum(tl.where(precede, items, 0), axis=0)
    tile = own_item % seq_tiles  # tiles that read the same keys run side by side
    part = own_item // seq_tiles
    first_query = tile * TOKENS
    prior = seq_len - query_len
    tile_end = tl.maximum(tl.minimum(seq_len, prior + first_query + TOKENS), 0)
    num_parts = tl.maximum(tl.cdiv(tile_end - first_of_seq, part_keys), 1)
    if part >= num_parts:  # all keys of the part come after the tile's last query
        return

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // HEADS
    heads = rows % HEADS
    present = (queries < query_len) & (heads < GROUP)
    columns = tl.arange(0, HEAD_DIM)[None, :]
    elements = ((token + queries).to(tl.int64) * (NUM_KV * GROUP) + kv_head * GROUP + heads)[:, None] * HEAD_DIM
    elements += columns
    q = as_factor(tl.load(q_ptr + elements, mask=present[:, None], other=0.0), k_cache_ptr.dtype.element_ty)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    k_ptr = k_cache_ptr + kv_head * stride_head
    v_ptr = v_cache_ptr + kv_head * stride_head
    positions = prior + queries
    begin = first_of_seq + part * part_keys
    end = tl.minimum(begin + part_keys, tile_end)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(prior + first_query + 1 - WINDOW, 0)
        begin = tl.maximum(begin, first_key // BLOCK_N * BLOCK_N)
    unmasked_end = tl.maximum(tl.minimum(end, prior + first_query + 1) // BLOCK_N * BLOCK_N, begin)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), NO_KEYS, tl.float32)  # finite, because a query may see no key of a part
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - known to the compiler, unlike the part
        if part == 0:  # begins with the sinks, which are a part without values
            row_max = tl.load(sinks_ptr + kv_head * GROUP + heads, mask=present, other=0.0) * SINK_UNITS
            row_sum += 1.0
    if WINDOW > 0:
        first_of_all = tl.maximum(prior + first_query + TOKENS - WINDOW, 0)  # seen by every query
        head_end = tl.maximum(tl.minimum(tl.cdiv(first_of_all, BLOCK_N) * BLOCK_N, unmasked_end), begin)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, positions, table_ptr, k_ptr, v_ptr, stride_block, stride_token,
            begin, head_end, scale_log2,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True, WINDOW=WINDOW, first_key=first_key,
        )  # fmt: skip
        begin = head_end
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, positions, table_ptr, k_ptr, v_ptr, stride_block, stride_token,
        begin, unmasked_end, scale_log2, HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, positions, table_ptr, k_ptr, v_ptr, stride_block, stride_token,
        unmasked_end, end, scale_log2,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True, WINDOW=WINDOW, first_key=first_key,
    )  # fmt: skip

    if num_parts == 1:
        out = output_of((acc, row_max, row_sum), v_scale)
        tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=present[:, None])
    else:
        are_cut = precede & (parts > 1)
        first_part = (tl.sum(tl.where(are_cut, items, 0), axis=0) + tile * seq_parts) * NUM_KV + kv_head
        stored = (first_part + part * NUM_KV) * TILE_ROWS + rows
        tl.store(partial_ptr + stored[:, None] * HEAD_DIM + columns, acc, mask=present[:, None])
        tl.store(maxima_ptr + stored, row_max, mask=present)
        tl.store(sums_ptr + stored, row_sum, mask=present)
        if is_last(arrivals_ptr + first_part, num_parts):
            first_row = first_part * TILE_ROWS
            unit_ptrs = (partial_ptr + first_row * HEAD_DIM, maxima_ptr + first_row, sums_ptr + first_row)
            head_ptr = out_ptr + ((token + first_query).to(tl.int64) * NUM_KV + kv_head) * GROUP * HEAD_DIM
            num_queries = tl.minimum(query_len - first_query, TOKENS)
            _join(
                head_ptr, unit_ptrs, v_scale, num_queries, num_parts,
                NUM_KV, GROUP, HEADS, HEAD_DIM, TILE_ROWS, JOIN_ROWS, UNITS_AT_ONCE,
            )  # fmt: skip


@triton.jit
def _join(
    out_ptr,  # of the tile's first query, at the first head of the group
    unit_ptrs,  # of the tile's first part: sums of values, maxima, sums of weights
    v_scale,
    num_queries,
    num_parts,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
):
    """Write the output of a tile whose parts have all been stored."""
    partial_ptr, maxima_ptr, sums_ptr = unit_ptrs
    columns = tl.arange(0, HEAD_DIM)[None, :]
    nothing = (
        tl.zeros((JOIN_ROWS, HEAD_DIM), tl.float32),
        tl.full((JOIN_ROWS,), NO_KEYS, tl.float32),
        tl.zeros((JOIN_ROWS,), tl.float32),
    )
    for first in range(0, num_queries * HEADS, JOIN_ROWS):
        rows = first + tl.arange(0, JOIN_ROWS)
        queries = rows // HEADS
        heads = rows % HEADS
        present = (queries < num_queries) & (heads < GROUP)
        ptrs = (partial_ptr + rows[:, None] * HEAD_DIM + columns, maxima_ptr + rows, sums_ptr + rows)
        masks = (present[:, None], present)
        stride: tl.constexpr = NUM_KV * TILE_ROWS
        whole = joined_units(nothing, nothing, ptrs, masks, num_parts, True, stride, HEAD_DIM, UNITS_AT_ONCE, 1)
        elements = (queries * (NUM_KV * GROUP) + heads)[:, None] * HEAD_DIM + columns
        tl.store(out_ptr + elements, output_of(whole, v_scale).to(out_ptr.dtype.element_ty), mask=masks[0])


def few_query_attention(prompts: PromptOperands, workspace: QueryParts, gpu: Gpu) -> Tensor:
    """Attend from every query: `[num_tokens, num_q_heads, head_dim]`.

    A KV head must not have more query heads than allowed by `tokens_of_tile`.
    """
    check_prompts(prompts)
    q, k_cache, v_cache = prompts.q, prompts.k_cache, prompts.v_cache
    num_tokens, num_q, head_dim = q.shape
    num_seqs, num_kv = prompts.seq_lens.shape[0], k_cache.shape[2]
    out = torch.empty_like(q)
    if num_tokens == 0 or num_seqs == 0:
        return out
    tokens = tokens_of_tile(q.dtype, num_q, num_kv)
    assert tokens > 0, f"{num_q // num_kv} query heads of a KV head: more than a tile has rows"
    room = (workspace.partial.shape[1], workspace.partial.shape[3])
    assert room == (num_kv, head_dim), f"workspace of KV heads, head_dim {room}: ({num_kv}, {head_dim}) needed"
    heads = triton.next_power_of_2(num_q // num_kv)
    tile = tile_for(q.dtype, head_dim, 1, gpu.shared_bytes)
    assert tile.block_m == tokens * heads and PART_UNIT % tile.block_n == 0, f"{tile}: of other rows or keys"
    most_tiles = min(num_tokens, num_tiles(num_tokens, num_seqs, tokens))
    _few_query_attention_kernel[(num_kv, most_tiles + workspace.max_parts)](
        q_ptr=q,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=prompts.block_tables,
        cu_seqlens_ptr=prompts.cu_seqlens,
        seq_lens_ptr=prompts.seq_lens,
        sinks_ptr=prompts.sinks,
        out_ptr=out,
        partial_ptr=workspace.partial,
        maxima_ptr=workspace.maxima,
        sums_ptr=workspace.sums,
        arrivals_ptr=workspace.arrivals,
        scale_log2=prompts.scale * LOG2_E,
        v_scale=prompts.v_scale if is_e4m3(v_cache) else None,
        num_seqs=num_seqs,
        table_stride=prompts.block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        MAX_SEQS=max_seqs_for(num_seqs),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        TILE_ROWS=TILE_ROWS,
        ALL_PARTS=workspace.max_parts,
        MAX_PARTS=MAX_PARTS,
        MIN_PART_KEYS=MIN_PART_KEYS,
        PART_UNIT=PART_UNIT,
        JOIN_ROWS=JOIN_ROWS,
        UNITS_AT_ONCE=min(16 * 1024 // (JOIN_ROWS * head_dim), MAX_PARTS),  # as many as 128 registers of a thread hold
        WINDOW=prompts.window,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
