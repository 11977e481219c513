"""Causal attention of long prompt steps: K and V are gathered from their blocks first, then read in large tiles.

A matrix unit waits longer for scattered blocks than copying the blocks takes. The copy pays because a step of thousands
of tokens reads every key many times, but gathers once. Attention is then limited by the softmax, for which the matrix
units wait. So the warps of a program have different tasks, and some product is nearly always running (FlashAttention-3,
Shah et al. 2024). One warp fetches tiles by the tensor memory accelerator; two groups of four warps attend, 64 queries
each.

A group starts two products together: the scores of a tile, and the weights of the tile before times V. The softmax of
the scores runs beside the second product.

Each multiprocessor has a program, which draws items (`items`), a query tile of a head each. Longest contexts come
first, so all programs end at about the same time. Data of the next item arrive during attention to the last item.

Written in Gluon, Triton's lower layer, because in Gluon warps can have different tasks. Hopper only; Triton's
interpreter does not run Gluon. Query tiles of all sequences lie on one axis (`ragged`).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.kernels.attention.decode_parts import LOG2_E, SINK_UNITS
from common.kernels.attention.gather_kv import fetch, gather_kv, place_of
from common.kernels.base.attention_operands import PromptOperands
from common.kernels.base.checks import check_prompts
from common.kernels.base.e4m3 import is_e4m3
from common.kernels.base.gpu import gpu_of
from common.kernels.base.items import advance, announced
from common.kernels.base.ragged import max_seqs_for, num_tiles

ROWS = 64  # queries of a group of four warps, multiplied at once
BLOCK_M = 2 * ROWS  # queries of a program
STAGES = 2  # tiles of keys in shared memory, and as many of values
TILES = {64: 128, 128: 128, 256: 64}  # keys of a tile, by the size of heads
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # of every tile


@gluon.jit
def _masked(scores, tile, positions, WINDOW: gl.constexpr):
    """Mask scores of a tile of keys: -inf where the query does not see the key."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    seen = keys[None, :] <= positions[:, None]
    if WINDOW > 0:
        seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _weigh(scores, row_max, scale_log2):
    """Return weights of a tile relative to the new running maximum, and the new maximum in units of log2."""
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * scale_log2)
    return gl.exp2(scores * scale_log2 - new_max[:, None]), new_max


@gluon.jit
def _lane_sums(weights):
    """Sum `[ROWS, BLOCK_N]` to `[ROWS, 4]`: each of the four lanes sharing a row sums two columns in every eight.

    Lanes are added up only at the end, because shuffles in every tile would cost latency.
    """
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, COLUMNS // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _as_operand(weights, acc, dtype: gl.constexpr):
    """Convert weights to the operand layout of the product with V; every lane already has its elements."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(weights.to(dtype), layout)


@gluon.jit
def _begin(
    shared, slot, phase, tile, end, positions, scale_log2, GROUP_ID: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Compute the state after an item's first tile of keys, as `_step` leaves it."""
    queries, k_ring, _, _, _, _, k_full, k_empty, _, _ = shared
    ROWS: gl.constexpr = queries.shape[1]
    HEAD_DIM: gl.constexpr = queries.shape[2]
    STAGES: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, HEAD_DIM, 16])
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    mbarrier.wait(k_full.index(slot), phase)
    k = k_ring.index(slot).permute((1, 0))
    scores = warpgroup_mma(queries.index(GROUP_ID), k, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(slot), count=1)
    lowest = gl.full([ROWS], -1e38, gl.float32, gl.SliceLayout(1, scores_layout))  # finite: differences are numbers
    weights, row_max = _weigh(_masked(scores, tile, positions, WINDOW), lowest, scale_log2)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
    next_slot, next_phase = advance(slot, phase, STAGES)
    mbarrier.wait(k_full.index(next_slot), next_phase, pred=tile + 1 < end)
    return weights, acc, row_max, _lane_sums(weights), slot, phase


@gluon.jit
def _step(
    shared,  # as in the kernel
    state,  # weights of tile - 1; acc before them; row_max and lane sums after them; slot and phase of tile - 1
    tile,  # of keys, arrived
    end,  # tile behind the last
    positions,
    scale_log2,
    GROUP_ID: gl.constexpr,
    IS_MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Compute the state after another tile; its scores run together with the product of the last weights and V."""
    queries, k_ring, v_ring, _, _, _, k_full, k_empty, v_full, v_empty = shared
    weights, acc, row_max, row_sums, v_slot, v_phase = state
    STAGES: gl.constexpr = k_ring.shape[0]
    scores_layout: gl.constexpr = weights.type.layout
    zero = gl.zeros([weights.shape[0], weights.shape[1]], gl.float32, scores_layout)
    weights = _as_operand(weights, acc, queries.dtype)
    slot, phase = advance(v_slot, v_phase, STAGES)
    k = k_ring.index(slot).permute((1, 0))
    scores = warpgroup_mma(queries.index(GROUP_ID), k, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), v_phase)
    acc = warpgroup_mma(weights, v_ring.index(v_slot), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])  # the product with V goes on
    mbarrier.arrive(k_empty.index(slot), count=1)
    if IS_MASKED:
        scores = _masked(scores, tile, positions, WINDOW)
    new_weights, new_max = _weigh(scores, row_max, scale_log2)
    decay = gl.exp2(row_max - new_max)
    row_sums = row_sums * gl.convert_layout(decay, gl.SliceLayout(1, row_sums.type.layout))[:, None]
    row_sums += _lane_sums(new_weights)
    # The wait for the next keys stands between the softmax and the wait for the product. Without it, the assembler puts
    # the wait for the product first, and the softmax no longer runs beside the product.
    next_slot, next_phase = advance(slot, phase, STAGES)
    mbarrier.wait(k_full.index(next_slot), next_phase, pred=tile + 1 < end)
    acc, weights, new_weights = warpgroup_mma_wait(0, deps=[acc, weights, new_weights])
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return new_weights, acc, new_max, row_sums, slot, phase


@gluon.jit
def _finish(shared, state, sinks_ptr, v_scale, head):
    """Add the last weights times V, and normalize: `[ROWS, HEAD_DIM]`, then slot and phase of the next item's keys."""
    queries, k_ring, v_ring, _, _, _, _, _, v_full, v_empty = shared
    weights, acc, row_max, row_sums, slot, phase = state
    mbarrier.wait(v_full.index(slot), phase)
    acc = warpgroup_mma(_as_operand(weights, acc, queries.dtype), v_ring.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(slot), count=1)
    slot, phase = advance(slot, phase, k_ring.shape[0])
    row_sum = gl.convert_layout(gl.sum(row_sums, axis=1), gl.SliceLayout(1, acc.type.layout))
    if sinks_ptr is not None:  # infinite if far above all scores: then the output is 0
        sink = gl.exp2(gl.load(sinks_ptr + head) * SINK_UNITS - row_max)
        row_sum += gl.convert_layout(sink, gl.SliceLayout(1, acc.type.layout))
    inverse = 1.0 / row_sum
    if v_scale is not None:
        inverse = inverse * v_scale
    return acc * inverse[:, None], slot, phase


@gluon.jit
def _attend(
    shared,  # as in the kernel
    work,  # as in the kernel
    sinks_ptr, out_ptr, scale_log2, v_scale,
    GROUP_ID: gl.constexpr,  # 0 or 1
    NUM_Q: gl.constexpr, MAX_SEQS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Attend ROWS queries of every item: the task of four warps. Queries past the sequence's end are not stored."""
    queries, k_ring, _, item_smem, q_full, q_empty, _, _, _, _ = shared
    ROWS: gl.constexpr = queries.shape[1]
    HEAD_DIM: gl.constexpr = queries.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 16])
    num_items = work[3] * NUM_Q
    slot = 0
    phase = 0
    q_phase = 0
    item = announced(item_smem, q_full, q_phase)
    while item < num_items:
        token, query_len, prior, first_query, head, _first_row, begin, end = place_of(
            item, work, NUM_Q, MAX_SEQS, 2 * ROWS, BLOCK_N, WINDOW
        )
        query = first_query + GROUP_ID * ROWS
        positions = prior + query + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        at_diagonal = gl.minimum(gl.maximum((prior + query + 1) // BLOCK_N, begin + 1), end)
        state = _begin(shared, slot, phase, begin, end, positions, scale_log2, GROUP_ID, WINDOW)
        begin += 1
        if WINDOW > 0:  # tiles not seen whole by every query
            seen_by_all = gl.cdiv(gl.maximum(prior + query + ROWS - WINDOW, 0), BLOCK_N)
            seen_by_all = gl.minimum(gl.maximum(seen_by_all, begin), at_diagonal)
            for tile in range(begin, seen_by_all):
                state = _step(shared, state, tile, end, positions, scale_log2, GROUP_ID, True, WINDOW)
            begin = seen_by_all
        for tile in range(begin, at_diagonal):
            state = _step(shared, state, tile, end, positions, scale_log2, GROUP_ID, False, WINDOW)
        for tile in range(at_diagonal, end):
            state = _step(shared, state, tile, end, positions, scale_log2, GROUP_ID, True, WINDOW)
        mbarrier.arrive(q_empty, count=1)
        out, slot, phase = _finish(shared, state, sinks_ptr, v_scale, head)
        rows = query + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
        columns = head * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out.type.layout))
        elements = (token + rows).to(gl.int64)[:, None] * (NUM_Q * HEAD_DIM) + columns[None, :]
        gl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=(rows < query_len)[:, None])
        q_phase ^= 1
        item = announced(item_smem, q_full, q_phase)


@gluon.jit(do_not_specialize=["num_seqs", "num_query_tiles"])  # both differ from batch to batch
def _long_attention_kernel(
    q_desc,  # [num_tokens, NUM_Q * HEAD_DIM], tiles of ROWS x HEAD_DIM
    kv_desc,  # [2 * num_rows, num_kv * HEAD_DIM], K, then V, as gathered; tiles of BLOCK_N x HEAD_DIM
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [NUM_Q] fp32, or None
    out_ptr,  # [num_tokens, NUM_Q, HEAD_DIM], contiguous
    ticket_ptr,  # [1] int32, items drawn so far: set to 0 by the kernel before
    scale_log2,  # softmax scale times log2(e)
    v_scale,  # of gathered values, or None
    num_seqs,
    num_rows,
    num_query_tiles,
    NUM_Q: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    HEAD_DIM: gl.constexpr,
    MAX_SEQS: gl.constexpr,  # power of two, at least num_seqs
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Grid: any size. Programs draw items of 2 * ROWS queries of a head until none is left."""
    queries = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, HEAD_DIM], q_desc.layout)
    k_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_desc.layout)
    v_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_desc.layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Barriers of K and V are separate allocations: in a single allocation, the compiler adds a meeting of warps to
    # every tile.
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)  # both groups
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    shared = (queries, k_ring, v_ring, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    work = (cu_seqlens_ptr, seq_lens_ptr, num_seqs, num_query_tiles)
    gl.warp_specialize(
        [
            (_attend, (shared, work, sinks_ptr, out_ptr, scale_log2, v_scale, 0, NUM_Q, MAX_SEQS, WINDOW)),
            (_attend, (shared, work, sinks_ptr, out_ptr, scale_log2, v_scale, 1, NUM_Q, MAX_SEQS, WINDOW)),
            (fetch, (shared, work, ticket_ptr, q_desc, kv_desc, num_rows, NUM_Q, GROUP, MAX_SEQS, WINDOW)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def long_attention(prompts: PromptOperands, num_keys: int) -> Tensor:
    """Attend from every query: `[num_tokens, num_q_heads, head_dim]`.

    Takes memory for a copy of K and V of all keys seen. Queries have 16 bits and a head_dim of `TILES`, and every
    sequence has at least as many keys as queries.

    Args:
        num_keys: at least the sum of `seq_lens`.
    """
    check_prompts(prompts)
    q, k_cache, v_cache, window = prompts.q, prompts.k_cache, prompts.v_cache, prompts.window
    (num_tokens, num_q, head_dim), num_seqs, num_kv = q.shape, prompts.seq_lens.shape[0], k_cache.shape[2]
    assert head_dim in TILES and q.element_size() == 2, f"head_dim {head_dim}, {q.dtype}: one of {[*TILES]}, 16 bits"
    tile = TILES[head_dim]
    ticket = torch.empty(1, dtype=torch.int32, device=q.device)
    if window:
        num_keys = min(num_keys, num_tokens + num_seqs * (window + tile))
    kv = gather_kv(
        k_cache,
        v_cache,
        prompts.block_tables,
        prompts.seq_lens,
        num_keys,
        tile=tile,
        window=window,
        cu_seqlens=prompts.cu_seqlens,
        dtype=q.dtype if is_e4m3(k_cache) else None,
        zeroed=ticket,
    )
    out = torch.empty_like(q)
    num_query_tiles = num_tiles(num_tokens, num_seqs, BLOCK_M)
    _long_attention_kernel[(min(gpu_of(q.device).num_sms, num_q * num_query_tiles),)](
        q_desc=TensorDescriptor.from_tensor(q.view(num_tokens, -1), [ROWS, head_dim], LAYOUT),
        kv_desc=TensorDescriptor.from_tensor(kv.flatten(0, 1), [tile, head_dim], LAYOUT),
        cu_seqlens_ptr=prompts.cu_seqlens,
        seq_lens_ptr=prompts.seq_lens,
        sinks_ptr=prompts.sinks,
        out_ptr=out,
        ticket_ptr=ticket,
        scale_log2=prompts.scale * LOG2_E,
        v_scale=prompts.v_scale if is_e4m3(v_cache) else None,
        num_seqs=num_seqs,
        num_rows=kv.shape[1],
        num_query_tiles=num_query_tiles,
        NUM_Q=num_q,
        GROUP=num_q // num_kv,
        HEAD_DIM=head_dim,
        MAX_SEQS=max_seqs_for(num_seqs),
        ROWS=ROWS,
        BLOCK_N=tile,
        STAGES=STAGES,
        WINDOW=window,
        num_warps=4,  # warps of a group; other warps come on top
    )
    return out
