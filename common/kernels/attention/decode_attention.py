"""Attention of one token a sequence; each program computes items of the batch's division (`decode_division`).

All query heads of a KV head share a tile, so K and V are read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_division import ITEM_WORDS, load_item, load_join, next_item
from common.kernels.attention.decode_parts import (
    LOG2_E,
    MAX_PARTS,
    NO_KEYS,
    PART_TILES,
    RUN_PARTS,
    TILE,
    PartsWorkspace,
    attended,
    begun,
    check_room,
    first_tile_of,
    folded,
    joined_units,
    num_tiles_of,
    output_of,
    part_tiles_of,
    units_at_once,
)
from common.kernels.base.attention_operands import Division
from common.kernels.base.checks import check_block_tables, check_column, check_queries
from common.kernels.base.e4m3 import as_factor, is_e4m3, widened
from common.kernels.base.last_program import is_last
from common.kernels.base.pdl import wait_for_predecessor

MIN_ROWS = 16  # of a matrix product on tensor cores
NUM_STAGES = 3
HUGE_KEYS = 16  # multiplied at once, with heads of 512


@triton.jit(do_not_specialize=["table_stride", "layer_id"])  # differs from batch to batch in a prefill worker
def _decode_attention_kernel(
    q_ptr,  # [num_seqs, num_q, head_dim], contiguous
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # as k_cache_ptr
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    items_ptr,  # [max_items, ITEM_WORDS] int32, of `Division`
    counts_ptr,  # [1 + num_layers] int32, of `Division`
    out_ptr,  # [num_seqs, num_q, head_dim], contiguous; written here for contexts that are whole
    partial_ptr,  # [max_joins, MAX_PARTS, num_q, head_dim] fp32, of `PartsWorkspace`
    maxima_ptr,  # [max_joins, MAX_PARTS, num_q] fp32, of `PartsWorkspace`
    sums_ptr,  # [max_joins, MAX_PARTS, num_q] fp32, of `PartsWorkspace`
    arrivals_ptr,  # [max_joins, NUM_KV] int32
    sinks_ptr,  # [NUM_Q] fp32, or None
    layer_id,
    scale_log2,  # softmax scale times log2(e)
    v_scale,  # of values in an e4m3 cache, or None
    table_stride,
    stride_block,  # of both caches, in elements, as are stride_token and stride_head
    stride_token,
    stride_head,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEADS: tl.constexpr,  # power of two, at least the query heads of a KV head
    ROWS: tl.constexpr,  # HEADS, and at least MIN_ROWS
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # multiplied at once; divides TILE
    ITEM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    PART_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: any number. Each program has an item of a KV head, and draws another after each item."""
    GROUP: tl.constexpr = NUM_Q // NUM_KV
    STEPS: tl.constexpr = TILE // KEYS  # of a tile
    num_items = tl.load(counts_ptr) * NUM_KV
    index = tl.program_id(0)
    while index < num_items:
        item_ptr = items_ptr + index // NUM_KV * ITEM_WORDS
        kv_head = index % NUM_KV
        seq, seq_len, begin, end, join, unit_parts = load_item(item_ptr)
        first_tile = first_tile_of(seq_len, WINDOW, TILE)
        part_tiles = part_tiles_of(num_tiles_of(seq_len, TILE) - first_tile, PART_TILES, MAX_PARTS)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        k_ptr = k_cache_ptr + kv_head * stride_head
        v_ptr = v_cache_ptr + kv_head * stride_head
        wait_for_predecessor(PDL)

        group = tl.arange(0, ROWS)
        columns = tl.arange(0, HEAD_DIM)[None, :]
        heads = kv_head * GROUP + group  # [ROWS], of the sequence
        row_heads = seq.to(tl.int64) * NUM_Q + heads  # over all sequences
        present = (group < GROUP)[:, None]
        q = tl.load(q_ptr + row_heads[:, None] * HEAD_DIM + columns, mask=present, other=0.0)
        q = as_factor(q, k_cache_ptr.dtype.element_ty)

        no_acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        lowest = tl.full((ROWS,), NO_KEYS, tl.float32)
        no_sum = tl.zeros((ROWS,), tl.float32)
        nothing = (no_acc, lowest, no_sum)
        part = nothing
        unit = nothing  # parts of the unit joined so far
        whole = begun(nothing, sinks_ptr, heads, group < GROUP)  # runs of the context joined so far
        first_unit = join.to(tl.int64) * (MAX_PARTS * NUM_Q)
        for step in tl.range(begin * STEPS, end * STEPS):
            keys = step * KEYS + tl.arange(0, KEYS)
            inside = keys < seq_len
            if WINDOW > 0:
                inside = inside & (keys >= seq_len - WINDOW)
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            elements = (blocks * stride_block + (keys % BLOCK_SIZE) * stride_token)[:, None] + columns
            k = widened(tl.load(k_ptr + elements, mask=inside[:, None], other=0.0), q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where(inside[None, :], scores * scale_log2, float("-inf"))
            v = widened(tl.load(v_ptr + elements, mask=inside[:, None], other=0.0), q.dtype)
            part = attended(part, scores, v)
            is_end = step + 1 == end * STEPS
            done = step + 1 - first_tile * STEPS
            if (done % (part_tiles * STEPS) == 0) | is_end:  # the part ends
                unit = folded(unit, part, 1)
                part = nothing
                if (done % (part_tiles * unit_parts * STEPS) == 0) | is_end:  # the unit ends, too
                    if join < 0:
                        whole = folded(whole, unit, 1)
                    else:
                        unit_acc, unit_max, unit_sum = unit
                        which = (step - first_tile * STEPS) // (part_tiles * unit_parts * STEPS)
                        indices = first_unit + which * NUM_Q + heads
                        tl.store(partial_ptr + indices[:, None] * HEAD_DIM + columns, unit_acc, mask=present)
                        tl.store(maxima_ptr + indices, unit_max, mask=group < GROUP)
                        tl.store(sums_ptr + indices, unit_sum, mask=group < GROUP)
                    unit = nothing

        if join < 0:
            elements = row_heads[:, None] * HEAD_DIM + columns
            tl.store(out_ptr + elements, output_of(whole, v_scale).to(out_ptr.dtype.element_ty), mask=present)
        else:
            num_joined, num_units = load_join(item_ptr)
            if is_last(arrivals_ptr + join * NUM_KV + kv_head, num_joined):
                parts = (partial_ptr, maxima_ptr, sums_ptr)
                _join(
                    out_ptr + (seq.to(tl.int64) * NUM_Q + kv_head * GROUP) * HEAD_DIM,
                    parts, sinks_ptr, v_scale, kv_head * GROUP, first_unit, num_units, unit_parts == RUN_PARTS,
                    NUM_Q, GROUP, HEADS, HEAD_DIM, UNITS_AT_ONCE, RUN_PARTS,
                )  # fmt: skip
        index = next_item(counts_ptr + 1 + layer_id, num_items)


@triton.jit
def _join(
    out_ptr,  # of the group
    parts,  # partial_ptr, maxima_ptr, sums_ptr
    sinks_ptr,
    v_scale,
    group_head,  # first head of the group
    first_unit,  # first head of the context's first unit, over all heads of all units
    num_units,
    are_runs,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    RUN_PARTS: tl.constexpr,
):
    """Write the output of a context whose units have all been stored."""
    partial_ptr, maxima_ptr, sums_ptr = parts
    group = tl.arange(0, HEADS)
    elements = group[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    nothing = (
        tl.zeros((HEADS, HEAD_DIM), tl.float32),
        tl.full((HEADS,), NO_KEYS, tl.float32),
        tl.zeros((HEADS,), tl.float32),
    )
    masks = ((group < GROUP)[:, None], group < GROUP)
    first_head = first_unit + group_head
    heads = first_head + group
    unit_ptrs = (partial_ptr + first_head * HEAD_DIM + elements, maxima_ptr + heads, sums_ptr + heads)
    whole = begun(nothing, sinks_ptr, group_head + group, masks[1])
    whole = joined_units(
        whole, nothing, unit_ptrs, masks, num_units, are_runs, NUM_Q, HEAD_DIM, UNITS_AT_ONCE, RUN_PARTS
    )
    tl.store(out_ptr + elements, output_of(whole, v_scale).to(out_ptr.dtype.element_ty), mask=masks[0])


def decode_attention(
    q: Tensor,  # [num_seqs, num_q_heads, head_dim], contiguous
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_cache: Tensor,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32; 0 is padding
    scale: float,
    division: Division,  # of `seq_lens` and the cache's KV heads
    workspace: PartsWorkspace,
    layer_id: int,
    *,
    window: int = 0,  # as in the division
    sinks: Tensor | None = None,  # [num_q_heads] fp32
    v_scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """Attend from each query to the last keys of the sequence: `[num_seqs, num_q_heads, head_dim]`, padding 0.

    Args:
        window: tokens seen by a token, itself included; 0: all.
        sinks: a score of no token for each head, in the sum of weights only.
        v_scale: of values in an e4m3 cache; the scale of keys is a factor of `scale`.
    """
    _check(q, k_cache, v_cache, block_tables, seq_lens, sinks)
    num_seqs, num_q, head_dim = q.shape
    num_kv = k_cache.shape[2]
    out = torch.empty_like(q)
    if num_seqs == 0:
        return out
    check_room(workspace, division, num_q, num_kv, head_dim)
    heads = triton.next_power_of_2(num_q // num_kv)
    is_huge = head_dim > 256
    _decode_attention_kernel[(min(division.items.shape[0] * num_kv, division.num_slots),)](
        q_ptr=q,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=block_tables,
        items_ptr=division.items,
        counts_ptr=division.counts,
        out_ptr=out,
        partial_ptr=workspace.partial,
        maxima_ptr=workspace.maxima,
        sums_ptr=workspace.sums,
        arrivals_ptr=workspace.arrivals,
        sinks_ptr=sinks,
        layer_id=layer_id,
        scale_log2=scale * LOG2_E,
        v_scale=v_scale if is_e4m3(v_cache) else None,
        table_stride=block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        NUM_Q=num_q,
        NUM_KV=num_kv,
        HEADS=heads,
        ROWS=max(MIN_ROWS, heads),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        KEYS=HUGE_KEYS if is_huge else TILE,
        ITEM_WORDS=ITEM_WORDS,
        TILE=TILE,
        PART_TILES=PART_TILES,
        MAX_PARTS=MAX_PARTS,
        RUN_PARTS=RUN_PARTS,
        UNITS_AT_ONCE=units_at_once(heads, head_dim),
        WINDOW=window,
        PDL=pdl,
        num_warps=8 if is_huge else 4,
        launch_pdl=pdl,
        num_stages=1 if q.dtype == torch.float32 else NUM_STAGES,
    )
    return out


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, sinks: Tensor | None
) -> None:
    check_queries(q, k_cache, v_cache, sinks)
    check_block_tables(block_tables, q.shape[0])
    check_column("seq_lens", seq_lens, q.shape[0])
