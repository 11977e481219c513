"""All work between two products of a decode step in one kernel: norms, RoPE, the write of K and V, and attention.

A program attends a KV head of a sequence over some parts of the context. An item of the batch's division
(`decode_division`) names the parts; then the program draws another item. A warp fetches keys and values by the tensor
memory accelerator, four warps attend, and fetching runs ahead into the next item.

A step writes one token a sequence, so the keys of all other tokens exist before the step begins. So fetching does not
wait for the QKV projection; the attending warps do. After the wait, the attending warps norm and rotate the queries.
With the last part of a context, the attending warps also norm, rotate and write the new key, and attend to it from
registers.

Written in Gluon, Triton's lower layer, because in Gluon warps can have different tasks. Hopper only, for elements of
two bytes, or e4m3; Triton's interpreter does not run Gluon.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from common.kernels.attention.decode_division import ITEM_WORDS
from common.kernels.attention.decode_parts import (
    LOG2_E,
    MAX_PARTS,
    PART_TILES,
    RUN_PARTS,
    TILE,
    PartsWorkspace,
    check_room,
    units_at_once,
)
from common.kernels.attention.hopper.attend_items import attend_items
from common.kernels.attention.hopper.paged_tiles import descriptor, fetch
from common.kernels.base.attention_operands import AttentionWeights, Division, SharedDivision, SharedParts
from common.kernels.base.checks import check_block_tables, check_column, check_qkv
from common.kernels.base.e4m3 import is_e4m3

MIN_ROWS = 8  # columns of the smallest `wgmma`
MAX_GROUP = 16  # query heads of a KV head
NUM_WARPS = 4
# By the programs on a multiprocessor: tiles on the way at once; registers of a thread, which leave others room.
STAGES_OF, MAX_REGS_OF = {3: 2, 2: 3, 1: 3}, {3: 80, 2: 80, 1: 200}
E4M3_STAGES_OF, E4M3_MAX_REGS_OF = {3: 4, 2: 6, 1: 6}, {3: 80, 2: 96, 1: 200}  # tiles have half the bytes
MAX_SHARING_DIM = 128  # of a head: larger tiles leave a multiprocessor room for one program
FETCH_REGS = 24  # of a thread of the fetching warp


@gluon.jit(do_not_specialize=["table_stride"])  # differs from batch to batch in a prefill worker
def _fused_decode_attention_kernel(
    qkv_ptr,  # [num_seqs, NUM_KV * (GROUP + 2), HEAD_DIM], contiguous; no heads of V if SHARES_KV
    q_norm_ptr,  # [HEAD_DIM]; anything if not HAS_NORM
    k_norm_ptr,  # [HEAD_DIM]; anything if not HAS_NORM
    bias_ptr,  # [NUM_KV * (GROUP + 2), HEAD_DIM], heads as in qkv; anything if not HAS_BIAS
    rope_ptr,  # [max_positions, HEAD_DIM] fp32: cos, then sin
    factors_ptr,  # [max_positions] fp32, of queries, or None
    pool_desc,  # [num_blocks * block_rows, NUM_KV * HEAD_DIM], tiles of BLOCK_SIZE x HEAD_DIM
    pool_ptr,  # memory of pool_desc
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    items_ptr,  # [max_items, ITEM_WORDS] int32, of `Division`
    counts_ptr,  # [1 + num_layers] int32, of `Division`
    out_ptr,  # [num_seqs, NUM_KV * GROUP, HEAD_DIM], contiguous; written here for contexts that are whole
    partial_ptr,  # [max_joins, MAX_PARTS, NUM_KV * GROUP, HEAD_DIM] fp32, of `PartsWorkspace`
    maxima_ptr,  # [max_joins, MAX_PARTS, NUM_KV * GROUP] fp32, of `PartsWorkspace`
    sums_ptr,  # [max_joins, MAX_PARTS, NUM_KV * GROUP] fp32, of `PartsWorkspace`
    arrivals_ptr,  # [max_joins, NUM_KV] int32
    before_partial_ptr,  # [max_items, NUM_KV, MAX_QUERIES, HEAD_DIM] fp32, of `SharedParts`
    before_maxima_ptr,  # [max_items, NUM_KV, MAX_QUERIES] fp32, of `SharedParts`
    before_sums_ptr,  # [max_items, NUM_KV, MAX_QUERIES] fp32, of `SharedParts`
    units_ptr,  # [num_seqs] int32, of `SharedDivision`
    pieces_ptr,  # [num_seqs] int32, of `SharedDivision`
    places_ptr,  # [num_seqs] int32, of `SharedDivision`
    sinks_ptr,  # [NUM_KV * GROUP] fp32, or None
    eps,
    scale_log2,  # softmax scale times log2(e)
    k_inverse,  # what keys of an e4m3 cache are multiplied by, or None
    v_inverse,  # as k_inverse, of values
    v_scale,  # of values in an e4m3 cache, or None
    table_stride,
    block_rows,  # rows of a block: K and V of all layers
    layer_row,  # row of a block at which the layer begins: BLOCK_SIZE rows of K, then as many of V
    NUM_KV: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    HEADS: gl.constexpr,  # power of two, at least GROUP
    ROWS: gl.constexpr,  # 8 or 16, at least GROUP
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,  # divides TILE
    ITEM_WORDS: gl.constexpr,
    TILE: gl.constexpr,
    PART_TILES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    RUN_PARTS: gl.constexpr,
    UNITS_AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,  # tiles on the way at once
    FETCH_REGS: gl.constexpr,
    MAX_QUERIES: gl.constexpr,  # 0: nothing is shared, and `before_partial_ptr` to `places_ptr` are unused
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NORMS_VALUES: gl.constexpr,
    SHARES_KV: gl.constexpr,
    WINDOW: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: any number. Each program has an item of a KV head, and draws another after each item."""
    dtype: gl.constexpr = pool_desc.dtype
    FACTOR: gl.constexpr = gl.float16 if dtype == gl.float8e4nv else dtype  # type of what is multiplied
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], dtype)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], ring_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], ring_layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], FACTOR)
    q_smem = gl.allocate_shared_memory(FACTOR, [ROWS, HEAD_DIM], q_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE], FACTOR)
    p_smem = gl.allocate_shared_memory(FACTOR, [ROWS, TILE], p_layout)
    warps_smem = q_smem
    if dtype != FACTOR:
        warps_smem = gl.allocate_shared_memory(
            gl.float32, [gl.num_warps(), ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(item_full, count=1)
    mbarrier.init(item_empty, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    shared = (k_ring, v_ring, q_smem, p_smem, item_smem, item_full, item_empty, full, empty)
    division = (items_ptr, counts_ptr, counts_ptr + 1 + layer_row // (2 * BLOCK_SIZE))
    pool = (pool_desc, pool_ptr, block_tables_ptr, table_stride, block_rows, layer_row)
    token = (qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, rope_ptr, factors_ptr, eps, k_inverse, v_inverse)
    parts = (partial_ptr, maxima_ptr, sums_ptr, arrivals_ptr)
    before = (before_partial_ptr, before_maxima_ptr, before_sums_ptr, units_ptr, pieces_ptr, places_ptr)
    gl.warp_specialize(
        [
            (
                attend_items,
                (
                    shared, warps_smem, division, pool, token, out_ptr, parts, before, sinks_ptr, scale_log2, v_scale,
                    NUM_KV, GROUP, HEADS, BLOCK_SIZE, ITEM_WORDS, PART_TILES, MAX_PARTS, RUN_PARTS, UNITS_AT_ONCE,
                    MAX_QUERIES, HAS_NORM, HAS_BIAS, NORMS_VALUES, SHARES_KV, WINDOW, PDL,
                ),
            ),
            (fetch, (shared, division, pool, NUM_KV, BLOCK_SIZE, ITEM_WORDS, WINDOW)),
        ],
        worker_num_warps=[1],
        worker_num_regs=[FETCH_REGS],
    )  # fmt: skip


def is_supported(num_q_heads: int, kv_cache: Tensor) -> bool:
    """Tell whether the kernel supports a pool and the number of query heads; the caller checks the GPU."""
    block_size, num_kv, head_dim = kv_cache.shape[3:]
    fits = head_dim in (64, 128, 256) and block_size >= 16 and TILE % block_size == 0
    return fits and num_q_heads <= MAX_GROUP * num_kv and kv_cache.element_size() <= 2


def fused_decode_attention(
    qkv: Tensor,  # [num_seqs, num_heads * head_dim], contiguous
    weights: AttentionWeights,
    kv_cache: Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous
    layer_id: int,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32, the new token included; 0 is padding
    division: Division,  # of `seq_lens` and the pool's KV heads
    workspace: PartsWorkspace,
    *,
    programs_per_sm: int,
    shared: SharedDivision | None = None,
    before: SharedParts | None = None,
    pdl: bool = False,
) -> Tensor:
    """Write K and V of each sequence's last token to its slot, and attend: `[num_seqs, num_q_heads * head_dim]`.

    The token's position is `seq_len - 1`, and the slot follows from the block table. Padding gives zeros and writes
    nothing. With fewer `programs_per_sm`, each program has more tiles on the way. Heads above MAX_SHARING_DIM need 1.

    With `pdl`, some inputs must be older than the kernel before: block tables, seq_lens, the division, and all K and V
    but the new. If the division leaves out keys of a `shared` division, `before` is their result by
    `shared_prefix_attention`. Then all inputs named must be older than the kernel before `shared_prefix_attention`,
    because `shared_prefix_attention` lets this kernel start ahead (`wait_behind_next`).
    """
    _check(qkv, weights, kv_cache, block_tables, seq_lens)
    num_seqs, num_q, head_dim = qkv.shape[0], weights.num_q_heads, weights.head_dim
    _, num_layers, _, block_size, num_kv, _ = kv_cache.shape
    heads = triton.next_power_of_2(num_q // num_kv)
    out = torch.empty((num_seqs, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_seqs == 0:
        return out.flatten(1)
    check_room(workspace, division, num_q, num_kv, head_dim)
    (k_scale, v_scale), is_narrow = weights.cache_scales(kv_cache.dtype), is_e4m3(kv_cache)
    stages, max_regs = (E4M3_STAGES_OF, E4M3_MAX_REGS_OF) if is_narrow else (STAGES_OF, MAX_REGS_OF)
    _fused_decode_attention_kernel[(min(division.items.shape[0] * num_kv, division.num_slots),)](
        qkv_ptr=qkv,
        q_norm_ptr=weights.rope if weights.q_norm is None else weights.q_norm,
        k_norm_ptr=weights.rope if weights.k_norm is None else weights.k_norm,
        bias_ptr=weights.rope if weights.bias is None else weights.bias,
        rope_ptr=weights.rope,
        factors_ptr=weights.query_factors,
        pool_desc=descriptor(kv_cache),
        pool_ptr=kv_cache,
        block_tables_ptr=block_tables,
        items_ptr=division.items,
        counts_ptr=division.counts,
        out_ptr=out,
        partial_ptr=workspace.partial,
        maxima_ptr=workspace.maxima,
        sums_ptr=workspace.sums,
        arrivals_ptr=workspace.arrivals,
        before_partial_ptr=workspace.partial if before is None else before.partial,
        before_maxima_ptr=workspace.maxima if before is None else before.maxima,
        before_sums_ptr=workspace.sums if before is None else before.sums,
        units_ptr=seq_lens if shared is None else shared.units,
        pieces_ptr=seq_lens if shared is None else shared.pieces,
        places_ptr=seq_lens if shared is None else shared.places,
        sinks_ptr=weights.sinks,
        eps=weights.norm_eps,
        scale_log2=weights.scale * k_scale * LOG2_E,
        k_inverse=1.0 / k_scale if is_narrow else None,
        v_inverse=1.0 / v_scale if is_narrow else None,
        v_scale=v_scale if is_narrow else None,
        table_stride=block_tables.stride(0),
        block_rows=num_layers * 2 * block_size,
        layer_row=layer_id * 2 * block_size,
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        HEADS=heads,
        ROWS=max(MIN_ROWS, heads),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ITEM_WORDS=ITEM_WORDS,
        TILE=TILE,
        PART_TILES=PART_TILES,
        MAX_PARTS=MAX_PARTS,
        RUN_PARTS=RUN_PARTS,
        UNITS_AT_ONCE=units_at_once(heads, head_dim),
        STAGES=stages[programs_per_sm],
        FETCH_REGS=FETCH_REGS,
        MAX_QUERIES=0 if before is None else before.sums.shape[2],
        HAS_NORM=weights.q_norm is not None,
        HAS_BIAS=weights.bias is not None,
        NORMS_VALUES=weights.norms_values,
        SHARES_KV=weights.shares_kv,
        WINDOW=weights.window,
        PDL=pdl,
        num_warps=NUM_WARPS,  # attending warps; the fetching warp comes on top
        maxnreg=max_regs[programs_per_sm],
        launch_pdl=pdl,
    )
    return out.flatten(1)


def _check(qkv: Tensor, weights: AttentionWeights, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    num_seqs, num_q, num_kv, head_dim = qkv.shape[0], weights.num_q_heads, weights.num_kv_heads, weights.head_dim
    assert is_supported(num_q, kv_cache), f"{num_q} heads, pool {tuple(kv_cache.shape)} {kv_cache.dtype}: unsupported"
    fits = kv_cache.shape[4:] == (num_kv, head_dim) and num_q % num_kv == 0
    assert fits, f"pool {tuple(kv_cache.shape)}: heads differ"
    assert kv_cache.is_contiguous(), f"pool strides {kv_cache.stride()}: contiguous needed"
    assert kv_cache.numel() // (num_kv * head_dim) < 1 << 31, "rows of the pool are counted in int32"
    fits = qkv.element_size() == 2 and (qkv.dtype == kv_cache.dtype or is_e4m3(kv_cache))
    assert fits, f"qkv {qkv.dtype}, pool {kv_cache.dtype}: one dtype, or e4m3 beside 16 bits needed"
    check_qkv(qkv, weights)
    check_block_tables(block_tables, num_seqs)
    check_column("seq_lens", seq_lens, num_seqs)
