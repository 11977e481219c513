"""Causal attention of long prompt steps: K and V are gathered from their blocks first, then read in large tiles.

Reading scattered blocks costs a matrix unit more waiting than copying them costs memory: a step of
thousands of tokens reads every key many times and gathers it once. What then limits attention is the
softmax, for which the matrix units wait. So the warps of a program have different tasks, and some product
is nearly always running (FlashAttention-3, Shah et al. 2024): one warp fetches tiles by the tensor memory
accelerator; two groups of four attend, 64 queries each, and take the softmax of one tile of keys while
the scores of the next are computed.

Written in Gluon, Triton's lower layer, since there warps can be told apart. Hopper only; Triton's
interpreter does not run it. Query tiles of all sequences lie on one grid axis (`ragged`).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.kernels.gather_kv import TILE, gather_kv
from common.kernels.prefill_attention import LOG2_E, check_operands
from common.kernels.ragged import first_tile, max_seqs_for, num_tiles, sequence_of

ROWS = 64  # queries of a group of four warps, what they multiply at once
BLOCK_M = 2 * ROWS  # of a program
STAGES = 2  # tiles of keys in shared memory, and as many of values
MAX_KEYS = 65536  # of one step: what gathering may take of memory
MIN_TOKENS = 1024  # of a step; below, gathering does not pay
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # of every tile


@gluon.jit
def _fetch(
    shared,  # as in the kernel
    place,  # as in the kernel
    q_desc,
    kv_desc,
    row,  # of the sequence's first key
    column,  # of the KV head
    num_rows,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp's task: the queries, then tiles of K and V by turns, each when both groups have left its slot."""
    queries, k_ring, v_ring, queries_full, k_full, k_empty, v_full, v_empty = shared
    token, _, _, first_query, query_column, num_key_tiles = place
    mbarrier.expect(queries_full, 2 * ROWS * HEAD_DIM * 2)
    for group in gl.static_range(2):
        first_row = token + first_query + group * ROWS
        tma.async_copy_global_to_shared(q_desc, [first_row, query_column], queries_full, queries.index(group))
    slot = 0
    phase = 1  # the first wait for an empty slot returns at once
    for tile in range(num_key_tiles):
        k_row = row + tile * BLOCK_N
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(kv_desc, [k_row, column], k_full.index(slot), k_ring.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(kv_desc, [num_rows + k_row, column], v_full.index(slot), v_ring.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _masked(scores, tile, positions, BLOCK_N: gl.constexpr):
    """Scores of a tile of keys, -inf where the key comes after the query."""
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    return gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))


@gluon.jit
def _softmax(
    scores,  # [ROWS, BLOCK_N] fp32
    acc,  # [ROWS, HEAD_DIM] fp32, not yet normalized
    row_max,  # [ROWS] fp32, in units of log2
    row_sum,  # [ROWS] fp32
    scale_log2,
    dtype: gl.constexpr,
):
    """Weights of a tile as the product with V takes them, and the running state with the new maximum."""
    weights_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    decay = gl.exp2(row_max - new_max)
    row_sum = row_sum * decay + gl.sum(weights, axis=1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(weights.to(dtype), weights_layout), acc, new_max, row_sum


@gluon.jit
def _attend(
    shared,  # as in the kernel
    place,  # as in the kernel
    out_ptr,
    scale_log2,
    GROUP_ID: gl.constexpr,  # 0 or 1
    NUM_Q: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps' task: ROWS queries. Queries past the sequence's end are computed, whatever they hold, not stored."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, HEAD_DIM, 16])
    scores_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    queries, k_ring, v_ring, queries_full, k_full, k_empty, v_full, v_empty = shared
    token, query_len, prior, first_query, query_column, num_key_tiles = place
    begin = first_query + GROUP_ID * ROWS
    positions = prior + begin + gl.arange(0, ROWS, scores_rows)
    first_masked = (prior + begin + 1) // BLOCK_N
    row_max = gl.full([ROWS], -1e38, gl.float32, scores_rows)  # finite: a query past the end may see nothing
    row_sum = gl.zeros([ROWS], gl.float32, scores_rows)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    mbarrier.wait(queries_full, 0)
    q = queries.index(GROUP_ID)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), count=1)
    slot = 0
    phase = 0
    for tile in range(num_key_tiles - 1):
        next_slot = slot + 1
        next_phase = phase
        if next_slot == STAGES:
            next_slot = 0
            next_phase ^= 1
        if tile >= first_masked:
            scores = _masked(scores, tile, positions, BLOCK_N)
        mbarrier.wait(k_full.index(next_slot), next_phase)
        k = k_ring.index(next_slot).permute((1, 0))
        next_scores = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        weights, acc, row_max, row_sum = _softmax(scores, acc, row_max, row_sum, scale_log2, queries.dtype)
        mbarrier.wait(v_full.index(slot), phase)
        acc = warpgroup_mma(weights, v_ring.index(slot), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[next_scores])  # the product with V goes on
        mbarrier.arrive(k_empty.index(next_slot), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot), count=1)
        slot = next_slot
        phase = next_phase
    scores = _masked(scores, num_key_tiles - 1, positions, BLOCK_N)
    weights, acc, row_max, row_sum = _softmax(scores, acc, row_max, row_sum, scale_log2, queries.dtype)
    mbarrier.wait(v_full.index(slot), phase)
    acc = warpgroup_mma(weights, v_ring.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    out = acc / gl.convert_layout(row_sum, out_rows)[:, None]
    rows = begin + gl.arange(0, ROWS, out_rows)
    columns = query_column + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    elements = (token + rows).to(gl.int64)[:, None] * (NUM_Q * HEAD_DIM) + columns[None, :]
    gl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=(rows < query_len)[:, None])


@gluon.jit(do_not_specialize=["num_seqs"])  # differs from batch to batch
def _long_attention_kernel(
    q_desc,  # [num_tokens, NUM_Q * HEAD_DIM], tiles of ROWS x HEAD_DIM
    kv_desc,  # [2 * num_rows, num_kv * HEAD_DIM], K, then V, as gathered; tiles of BLOCK_N x HEAD_DIM
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_tokens, NUM_Q, HEAD_DIM], contiguous
    scale_log2,  # softmax scale times log2(e)
    num_seqs,
    num_rows,
    NUM_Q: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    HEAD_DIM: gl.constexpr,
    MAX_SEQS: gl.constexpr,  # power of two, at least num_seqs
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: (NUM_Q, query tiles). One program 2 * ROWS queries of a head, longest contexts first."""
    BLOCK_M: gl.constexpr = 2 * ROWS
    head = gl.program_id(0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    seqs = gl.arange(0, MAX_SEQS, gl.BlockedLayout([1], [32], [4], [0]))
    begins = gl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
    seq = sequence_of(tile, begins, seqs, num_seqs, BLOCK_M)
    token = gl.load(cu_seqlens_ptr + seq)
    query_len = gl.load(cu_seqlens_ptr + seq + 1) - token
    first_query = (tile - first_tile(token, seq, BLOCK_M)) * BLOCK_M
    if first_query < query_len:
        keys_before = gl.sum(gl.load(seq_lens_ptr + seqs, mask=seqs < seq, other=0), axis=0)
        row = first_tile(keys_before, seq, BLOCK_N) * BLOCK_N
        prior = gl.load(seq_lens_ptr + seq) - query_len
        num_key_tiles = gl.cdiv(prior + gl.minimum(query_len, first_query + BLOCK_M), BLOCK_N)
        query_column = head * HEAD_DIM
        column = head // GROUP * HEAD_DIM

        queries = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, HEAD_DIM], q_desc.layout)
        k_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_desc.layout)
        v_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_desc.layout)
        # Barriers of K and V are kept apart: in one piece, the compiler has warps meet once more a tile.
        queries_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(queries_full, count=1)
        for slot in gl.static_range(STAGES):
            mbarrier.init(k_full.index(slot), count=1)
            mbarrier.init(v_full.index(slot), count=1)
            mbarrier.init(k_empty.index(slot), count=2)  # both groups
            mbarrier.init(v_empty.index(slot), count=2)
        fence_async_shared()
        shared = (queries, k_ring, v_ring, queries_full, k_full, k_empty, v_full, v_empty)
        place = (token, query_len, prior, first_query, query_column, num_key_tiles)
        gl.warp_specialize(
            [
                (_attend, (shared, place, out_ptr, scale_log2, 0, NUM_Q, ROWS, BLOCK_N, HEAD_DIM, STAGES)),
                (_attend, (shared, place, out_ptr, scale_log2, 1, NUM_Q, ROWS, BLOCK_N, HEAD_DIM, STAGES)),
                (_fetch, (shared, place, q_desc, kv_desc, row, column, num_rows, ROWS, BLOCK_N, HEAD_DIM, STAGES)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )


def is_long(q: Tensor, num_keys: int) -> bool:
    """Whether a step on Hopper is of the kind that this is for; `num_keys` as in `ForwardBatch`."""
    num_tokens, _, head_dim = q.shape
    return num_tokens > MIN_TOKENS and 0 < num_keys <= MAX_KEYS and head_dim in (64, 128) and q.element_size() == 2


def long_attention(
    q: Tensor,  # [num_tokens, num_q_heads, head_dim], contiguous; head_dim 64 or 128, 16 bits
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided, heads contiguous
    v_cache: Tensor,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens: Tensor,  # [num_seqs + 1] int32
    seq_lens: Tensor,  # [num_seqs] int32, each at least its number of queries
    num_keys: int,  # at least the sum of seq_lens
    scale: float,
) -> Tensor:
    """What `prefill_attention` gives: `[num_tokens, num_q_heads, head_dim]`. Takes memory for K and V of all keys."""
    check_operands(q, k_cache, v_cache, block_tables, cu_seqlens, seq_lens)
    num_tokens, num_q, head_dim = q.shape
    num_seqs, num_kv = seq_lens.shape[0], k_cache.shape[2]
    assert head_dim in (64, 128) and q.element_size() == 2, f"head_dim {head_dim}, {q.dtype}: 64 or 128, 16 bits needed"
    kv = gather_kv(k_cache, v_cache, block_tables, seq_lens, num_keys)
    out = torch.empty_like(q)
    _long_attention_kernel[(num_q, num_tiles(num_tokens, num_seqs, BLOCK_M))](
        q_desc=TensorDescriptor.from_tensor(q.view(num_tokens, -1), [ROWS, head_dim], LAYOUT),
        kv_desc=TensorDescriptor.from_tensor(kv.flatten(0, 1), [TILE, head_dim], LAYOUT),
        cu_seqlens_ptr=cu_seqlens,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        scale_log2=scale * LOG2_E,
        num_seqs=num_seqs,
        num_rows=kv.shape[1],
        NUM_Q=num_q,
        GROUP=num_q // num_kv,
        HEAD_DIM=head_dim,
        MAX_SEQS=max_seqs_for(num_seqs),
        ROWS=ROWS,
        BLOCK_N=TILE,
        STAGES=STAGES,
        num_warps=4,  # of a group; those of the others come on top
    )
    return out
