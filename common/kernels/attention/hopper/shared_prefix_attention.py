"""Attention of decode rows over a shared prefix: each tile is read once for up to 128 queries.

Runs before attention of each row's own keys, in each layer of a step whose rows share blocks (`shared_division`).
Leaves the result of the shared keys for that attention: sums of values, not divided by the sums of weights. Queries are
normed and rotated here, too. After Hydragen (Juravsky et al., 2024), on a paged cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import LOG2_E, NO_KEYS, TILE
from common.kernels.attention.prefill_attention import attend_keys
from common.kernels.attention.shared_division import SHARED_ITEM_WORDS, load_shared_item
from common.kernels.attention.shared_parts import LARGE_BUNDLE, SMALL_BUNDLE
from common.kernels.base.attention_operands import AttentionWeights, SharedDivision, SharedParts
from common.kernels.base.checks import check_block_tables, check_column, check_qkv
from common.kernels.base.e4m3 import as_factor
from common.kernels.base.pdl import wait_behind_next

NUM_WARPS = {SMALL_BUNDLE: 4, LARGE_BUNDLE: 8}  # by queries of a bundle
NUM_STAGES = {SMALL_BUNDLE: 3, LARGE_BUNDLE: 5}


@triton.jit
def _load_queries(
    qkv_ptr, norm_ptr, bias_ptr, rope_ptr, factors_ptr, seq_lens_ptr, rows, heads, present, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return queries of rows and heads, normed and rotated: `[queries, HEAD_DIM]`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HEAD_DIM)
    partners = (dims + HALF) % HEAD_DIM
    past = tl.maximum(tl.load(seq_lens_ptr + rows, mask=present, other=1) - 1, 0)
    angle_ptr = rope_ptr + past.to(tl.int64)[:, None] * HEAD_DIM + (dims % HALF)[None, :]
    cos = tl.load(angle_ptr)
    sin = tl.load(angle_ptr + HALF)
    head_ptr = qkv_ptr + (rows.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM
    q = tl.load(head_ptr + dims[None, :], mask=present[:, None], other=0.0).to(tl.float32)
    partner = tl.load(head_ptr + partners[None, :], mask=present[:, None], other=0.0).to(tl.float32)
    if HAS_BIAS:
        q += tl.load(bias_ptr + (heads * HEAD_DIM)[:, None] + dims[None, :]).to(tl.float32)
        partner += tl.load(bias_ptr + (heads * HEAD_DIM)[:, None] + partners[None, :]).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(q * q, axis=1) / HEAD_DIM + eps)[:, None]
        q = q * scale * tl.load(norm_ptr + dims).to(tl.float32)[None, :]
        partner = partner * scale * tl.load(norm_ptr + partners).to(tl.float32)[None, :]
    q = q * cos + tl.where(dims < HALF, -partner, partner) * sin
    if factors_ptr is not None:
        q = q * tl.load(factors_ptr + past)[:, None]
    return q.to(qkv_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["table_stride"])
def _shared_prefix_attention_kernel(
    qkv_ptr,  # [num_seqs, NUM_HEADS, HEAD_DIM], contiguous: Q first
    q_norm_ptr,  # [HEAD_DIM]; anything if not HAS_NORM
    bias_ptr,  # [NUM_HEADS, HEAD_DIM]; anything if not HAS_BIAS
    rope_ptr,  # [max_positions, HEAD_DIM] fp32: cos, then sin
    factors_ptr,  # [max_positions] fp32, of queries, or None
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # as k_cache_ptr
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    members_ptr,  # [num_seqs] int32, of `SharedDivision`
    items_ptr,  # [max_items, ITEM_WORDS] int32, of `SharedDivision`
    num_items_ptr,  # [1] int32, of `SharedDivision`
    partial_ptr,  # [max_items, NUM_KV, MAX_QUERIES, HEAD_DIM] fp32, of `SharedParts`
    maxima_ptr,  # [max_items, NUM_KV, MAX_QUERIES] fp32, of `SharedParts`
    sums_ptr,  # [max_items, NUM_KV, MAX_QUERIES] fp32, of `SharedParts`
    eps,
    scale_log2,  # softmax scale times log2(e)
    table_stride,
    stride_block,  # of both caches, in elements, as are stride_token and stride_head
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # power of two, at least GROUP
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    QUERIES: tl.constexpr,  # of a bundle: HEADS of each row
    MAX_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: any number. Programs take items of KV heads in turn."""
    num_items = tl.load(num_items_ptr) * NUM_KV
    queries = tl.arange(0, QUERIES)
    wait_behind_next(PDL)  # also without an item: a kernel that waits for this kernel waits for all kernels before
    for index in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        item, kv_head = index // NUM_KV, index % NUM_KV
        first, num_members, begin, end = load_shared_item(items_ptr + item * ITEM_WORDS)
        leader = tl.load(members_ptr + first)  # any member would do, because all have the same blocks
        present = (queries // HEADS < num_members) & (queries % HEADS < GROUP)
        rows = tl.load(members_ptr + first + queries // HEADS, mask=present, other=0)
        heads = kv_head * GROUP + queries % HEADS
        q = _load_queries(
            qkv_ptr, q_norm_ptr, bias_ptr, rope_ptr, factors_ptr, seq_lens_ptr, rows, heads, present, eps,
            NUM_HEADS, HEAD_DIM, HAS_NORM, HAS_BIAS,
        )  # fmt: skip
        q = as_factor(q, k_cache_ptr.dtype.element_ty)
        acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
        row_max = tl.full((QUERIES,), NO_KEYS, tl.float32)
        row_sum = tl.zeros((QUERIES,), tl.float32)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, queries, block_tables_ptr + leader.to(tl.int64) * table_stride,
            k_cache_ptr + kv_head * stride_head, v_cache_ptr + kv_head * stride_head, stride_block, stride_token,
            begin * TILE, end * TILE, scale_log2, HEAD_DIM, BLOCK_SIZE, TILE, MASKED=False,
        )  # fmt: skip
        stored = index.to(tl.int64) * MAX_QUERIES + queries
        columns = tl.arange(0, HEAD_DIM)[None, :]
        tl.store(partial_ptr + stored[:, None] * HEAD_DIM + columns, acc, mask=present[:, None])
        tl.store(maxima_ptr + stored, row_max, mask=present)
        tl.store(sums_ptr + stored, row_sum, mask=present)


def shared_prefix_attention(
    qkv: Tensor,  # [num_seqs, num_heads * head_dim], contiguous
    weights: AttentionWeights,
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_cache: Tensor,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32, the new token included; 0 is padding
    division: SharedDivision,  # of `seq_lens` and the cache's KV heads
    parts: SharedParts,
    *,
    pdl: bool = False,
) -> None:
    """Store the results of all items of the division in `parts`; values of an e4m3 cache without their scale.

    With `pdl`, the division, block tables and seq_lens must be older than the kernel before.
    """
    num_seqs, num_q, head_dim = qkv.shape[0], weights.num_q_heads, weights.head_dim
    block_size, num_kv = k_cache.shape[1:3]
    check_qkv(qkv, weights)
    check_block_tables(block_tables, num_seqs)
    check_column("seq_lens", seq_lens, num_seqs)
    room = (parts.partial.shape[1], parts.partial.shape[3])
    assert room == (num_kv, head_dim), f"parts of KV heads, head_dim {room}: ({num_kv}, {head_dim}) needed"
    max_items = division.items.shape[0]
    assert max_items <= parts.partial.shape[0], f"parts of {parts.partial.shape[0]} items: {max_items} needed"
    heads = triton.next_power_of_2(num_q // num_kv)
    queries = division.tokens * heads
    assert queries in (SMALL_BUNDLE, LARGE_BUNDLE), f"bundles of {queries} queries"
    _shared_prefix_attention_kernel[(min(max_items * num_kv, division.num_slots),)](
        qkv_ptr=qkv,
        q_norm_ptr=weights.rope if weights.q_norm is None else weights.q_norm,
        bias_ptr=weights.rope if weights.bias is None else weights.bias,
        rope_ptr=weights.rope,
        factors_ptr=weights.query_factors,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=block_tables,
        seq_lens_ptr=seq_lens,
        members_ptr=division.members,
        items_ptr=division.items,
        num_items_ptr=division.num_items,
        partial_ptr=parts.partial,
        maxima_ptr=parts.maxima,
        sums_ptr=parts.sums,
        eps=weights.norm_eps,
        scale_log2=weights.scale * weights.cache_scales(k_cache.dtype)[0] * LOG2_E,
        table_stride=block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        NUM_HEADS=weights.num_heads,
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ITEM_WORDS=SHARED_ITEM_WORDS,
        QUERIES=queries,
        MAX_QUERIES=parts.partial.shape[2],
        TILE=TILE,
        HAS_NORM=weights.q_norm is not None,
        HAS_BIAS=weights.bias is not None,
        PDL=pdl,
        num_warps=NUM_WARPS[queries],
        num_stages=NUM_STAGES[queries],
        launch_pdl=pdl,
    )
