"""All between two products of a decode step in one kernel: norms, RoPE, the write of K and V, and attention.

Each program attends one KV head of one sequence over the parts of the context that an item of the batch's
division names (`decode_division`); a second kernel joins those that several programs computed. A step writes one
token a sequence, so the keys of all others are there before it begins: their first tiles are on their way by the
tensor memory accelerator before the wait for the QKV projection. Then each program norms and rotates its queries
itself; that of the last part does so with the new key too, which it writes and attends from registers.

Keys are the tall operand of `wgmma` and queries the short one: a group is rarely more than eight heads.
Written in Gluon, Triton's lower layer, since there a copy can be begun in one place and awaited in
another. Hopper only, two bytes an element; Triton's interpreter does not run it.
"""

import torch
import triton
import triton.language as tl
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

from common.kernels.checks import check_block_tables, check_column, check_qkv
from common.kernels.decode_division import ITEM_WORDS, load_item, next_item
from common.kernels.decode_parts import (
    LOG2_E,
    MAX_PARTS,
    NO_KEYS,
    TILE,
    PartsWorkspace,
    check_room,
    fold,
    join_parts_of_contexts,
    num_tiles_of,
    part_tiles_of,
)
from common.kernels.items import advance
from common.kernels.operands import AttentionWeights, Division
from common.kernels.paged_tiles import clear_end, load_tile
from common.kernels.pdl import wait_for_predecessor

MIN_ROWS = 8  # columns of the smallest `wgmma`
MAX_GROUP = 16  # query heads of a KV head
NUM_WARPS = 4
STAGES_OF = {3: 2, 2: 3}  # tiles on the way at once, by the programs that then share a multiprocessor


@gluon.jit
def _rotated(head_ptr, mask, norm_low, norm_high, cos, sin, eps, HAS_NORM: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Both halves of heads, normed and rotated, `[heads, HEAD_DIM // 2]` each, as `head_ptr` and all others are."""
    a = gl.load(head_ptr, mask=mask, other=0.0).to(gl.float32)
    b = gl.load(head_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(gl.float32)
    if HAS_NORM:
        scale = gl.rsqrt((gl.sum(a * a, axis=1) + gl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        a = a * scale * norm_low
        b = b * scale * norm_high
    dtype: gl.constexpr = head_ptr.dtype.element_ty
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@gluon.jit
def _begin_part(is_last, new_value, new_scores):
    """Sums of values and of weights and the maximum of a part to come: a context's last begins with the new key."""
    acc = gl.where(is_last, new_value, gl.zeros_like(new_value))
    row_sum = gl.where(is_last, gl.full_like(new_value, 1.0), gl.zeros_like(new_value))
    row_max = gl.where(is_last, new_scores, gl.full_like(new_scores, NO_KEYS))
    return acc, row_sum, row_max


@gluon.jit(do_not_specialize=["table_stride"])  # differs from batch to batch in a prefill worker
def _fused_decode_attention_kernel(
    qkv_ptr,  # [num_seqs, NUM_KV * (GROUP + 2), HEAD_DIM], contiguous
    q_norm_ptr,  # [HEAD_DIM]; anything if not HAS_NORM
    k_norm_ptr,  # the same
    rope_ptr,  # [max_positions, HEAD_DIM] fp32: cos, then sin
    pool_desc,  # [num_blocks * block_rows, NUM_KV * HEAD_DIM], tiles of BLOCK_SIZE x HEAD_DIM
    pool_ptr,  # the same memory
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    items_ptr,  # [max_items, ITEM_WORDS] int32, of `Division`, as the next
    counts_ptr,
    out_ptr,  # [num_seqs, NUM_KV * GROUP, HEAD_DIM], contiguous; written here for contexts that are whole
    partial_ptr,  # [max_joins, MAX_PARTS, NUM_KV * GROUP, HEAD_DIM] fp32, of `PartsWorkspace`, as the next two
    maxima_ptr,
    sums_ptr,
    eps,
    scale_log2,  # softmax scale times log2(e)
    table_stride,
    block_rows,  # rows of a block: K and V of all layers
    layer_row,  # where in a block the layer begins: BLOCK_SIZE rows of K, then as many of V
    NUM_KV: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    ROWS: gl.constexpr,  # 8 or 16, at least GROUP
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,  # divides TILE
    ITEM_WORDS: gl.constexpr,
    TILE: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    STAGES: gl.constexpr,  # tiles on the way at once
    HAS_NORM: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: any number. Each program has an item of a KV head, and draws another one when it is done."""
    dtype: gl.constexpr = pool_desc.dtype
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], dtype)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], ring_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], ring_layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], q_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE], dtype)
    p_smem = gl.allocate_shared_memory(dtype, [ROWS, TILE], p_layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    num_items = gl.load(counts_ptr) * NUM_KV
    slot = 0
    phase = 0
    index = gl.program_id(0)
    while index < num_items:
        slot, phase = _attend_item(
            items_ptr + index // NUM_KV * ITEM_WORDS, index % NUM_KV, slot, phase, k_ring, v_ring, q_smem, p_smem,
            arrived, qkv_ptr, q_norm_ptr, k_norm_ptr, rope_ptr, pool_desc, pool_ptr, block_tables_ptr, out_ptr,
            partial_ptr, maxima_ptr, sums_ptr, eps, scale_log2, table_stride, block_rows, layer_row,
            NUM_KV, GROUP, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, MAX_PARTS, STAGES, HAS_NORM, PDL, num_warps,
        )  # fmt: skip
        index = next_item(counts_ptr, num_items)


@gluon.jit
def _attend_item(
    item_ptr,  # [ITEM_WORDS] int32
    kv_head,
    slot,  # of the ring, and the phase that it is awaited in: where the item's tiles begin
    phase,
    k_ring,  # [STAGES, TILE, HEAD_DIM], shared memory, as the next four
    v_ring,
    q_smem,  # [ROWS, HEAD_DIM]
    p_smem,  # [ROWS, TILE]
    arrived,  # [STAGES] barriers
    qkv_ptr,  # this and what follows: as of the kernel
    q_norm_ptr,
    k_norm_ptr,
    rope_ptr,
    pool_desc,
    pool_ptr,
    block_tables_ptr,
    out_ptr,
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    eps,
    scale_log2,
    table_stride,
    block_rows,
    layer_row,
    NUM_KV: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One item from its first load to its output or its parts; where in the ring the next one's tiles begin."""
    HALF: gl.constexpr = HEAD_DIM // 2
    WIDTH: gl.constexpr = NUM_KV * HEAD_DIM
    dtype: gl.constexpr = pool_desc.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    mma_rows: gl.constexpr = gl.SliceLayout(0, mma)  # queries
    mma_dims: gl.constexpr = gl.SliceLayout(1, mma)  # keys, or dimensions of values
    halves: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [num_warps, 1], [1, 0])

    seq, seq_len, begin, end, join = load_item(item_ptr)
    tl.debug_barrier()  # all warps are done with the item before
    num_tiles = num_tiles_of(seq_len, TILE)  # the new key may be alone in the last
    part_tiles = part_tiles_of(num_tiles, MAX_PARTS)
    past = gl.maximum(seq_len - 1, 0)  # keys of earlier steps, and so the new one's position
    num_blocks = (past + BLOCK_SIZE - 1) // BLOCK_SIZE
    table_ptr = block_tables_ptr + seq.to(gl.int64) * table_stride
    column = kv_head * HEAD_DIM
    for stage in gl.static_range(STAGES):
        load_tile(
            pool_desc, table_ptr, k_ring.index((slot + stage) % STAGES), v_ring.index((slot + stage) % STAGES),
            arrived.index((slot + stage) % STAGES), (begin + stage) * (TILE // BLOCK_SIZE), num_blocks, block_rows,
            layer_row, column, begin + stage < end, BLOCK_SIZE, TILE, HEAD_DIM,
        )  # fmt: skip
    columns = gl.arange(0, HALF, gl.SliceLayout(0, halves))[None, :]
    angle_ptr = rope_ptr + past.to(gl.int64) * HEAD_DIM + columns
    cos = gl.load(angle_ptr)
    sin = gl.load(angle_ptr + HALF)
    q_norm_low = gl.load(q_norm_ptr + columns).to(gl.float32)
    q_norm_high = gl.load(q_norm_ptr + HALF + columns).to(gl.float32)
    k_norm_low = gl.load(k_norm_ptr + columns).to(gl.float32)
    k_norm_high = gl.load(k_norm_ptr + HALF + columns).to(gl.float32)
    new_block = gl.load(table_ptr + past // BLOCK_SIZE)
    wait_for_predecessor(PDL)

    rows = gl.arange(0, ROWS, gl.SliceLayout(1, halves))[:, None]
    token_ptr = qkv_ptr + seq.to(gl.int64) * (NUM_KV * (GROUP + 2) * HEAD_DIM)
    q_ptr = token_ptr + (kv_head * GROUP + rows) * HEAD_DIM + columns
    k_ptr = token_ptr + (NUM_KV * GROUP + kv_head) * HEAD_DIM + columns
    dims = gl.arange(0, HEAD_DIM, mma_dims)
    new_v = gl.load(token_ptr + (NUM_KV * (GROUP + 1) + kv_head) * HEAD_DIM + dims)
    q_low, q_high = _rotated(q_ptr, rows < GROUP, q_norm_low, q_norm_high, cos, sin, eps, HAS_NORM, HEAD_DIM)
    k_low, k_high = _rotated(k_ptr, columns < HALF, k_norm_low, k_norm_high, cos, sin, eps, HAS_NORM, HEAD_DIM)
    q_smem.slice(0, HALF, dim=1).store(q_low)
    q_smem.slice(HALF, HALF, dim=1).store(q_high)
    fence_async_shared()
    tl.debug_barrier()

    if (end == num_tiles) & (seq_len > 0):
        slot_row = new_block.to(gl.int64) * block_rows + layer_row + past % BLOCK_SIZE
        slot_ptr = pool_ptr + slot_row * WIDTH + column
        gl.store(slot_ptr + columns, k_low)
        gl.store(slot_ptr + HALF + columns, k_high)
        gl.store(slot_ptr + BLOCK_SIZE * WIDTH + dims, new_v)
    products = q_low.to(gl.float32) * k_low.to(gl.float32) + q_high.to(gl.float32) * k_high.to(gl.float32)
    new_scores = gl.convert_layout(gl.sum(products, axis=1), mma_rows) * scale_log2
    new_value = new_v.to(gl.float32)[:, None] + gl.zeros([HEAD_DIM, ROWS], gl.float32, mma)
    first_of_last = (num_tiles - 1) // part_tiles * part_tiles  # tile that the part of the new key begins with
    acc, row_sum, row_max = _begin_part(begin == first_of_last, new_value, new_scores)
    whole_acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, mma)  # of the parts joined so far, as the next two
    whole_max = gl.full([ROWS], NO_KEYS, gl.float32, mma_rows)
    whole_sum = gl.zeros([HEAD_DIM, ROWS], gl.float32, mma)
    group = gl.arange(0, ROWS, mma_rows)
    present = (group < GROUP)[None, :]
    heads = kv_head * GROUP + group  # [ROWS], of the sequence

    zero = gl.zeros([TILE, ROWS], gl.float32, mma)
    tile_keys = gl.arange(0, TILE, mma_dims)
    # Weights are summed up by a product, too, once for each dimension: no warp waits for another's sums.
    ones = gl.full([HEAD_DIM, TILE], 1.0, dtype, gl.DotOperandLayout(0, mma, k_width=2))
    left = part_tiles
    for tile in range(begin, end):
        num_keys = past - tile * TILE  # of this tile and those behind it
        mbarrier.wait(arrived.index(slot), phase)
        scores = warpgroup_mma(k_ring.index(slot), q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if num_keys < TILE:
            clear_end(v_ring.index(slot), num_keys, BLOCK_SIZE, TILE, HEAD_DIM)
        scores = gl.where((tile_keys < num_keys)[:, None], scores * scale_log2, -1e38)
        new_max = gl.maximum(row_max, gl.max(scores, axis=0))
        weights = gl.exp2(scores - new_max[None, :])
        decay = gl.exp2(row_max - new_max)
        row_max = new_max
        p_smem.permute((1, 0)).store(weights.to(dtype))
        fence_async_shared()
        tl.debug_barrier()
        acc = warpgroup_mma(
            v_ring.index(slot).permute((1, 0)), p_smem.permute((1, 0)), acc * decay[None, :], is_async=True
        )
        row_sum = warpgroup_mma(ones, p_smem.permute((1, 0)), row_sum * decay[None, :], is_async=True)
        acc, row_sum = warpgroup_mma_wait(0, deps=[acc, row_sum])
        if tile + STAGES < end:
            load_tile(
                pool_desc, table_ptr, k_ring.index(slot), v_ring.index(slot), arrived.index(slot),
                (tile + STAGES) * (TILE // BLOCK_SIZE), num_blocks, block_rows, layer_row, column,
                True, BLOCK_SIZE, TILE, HEAD_DIM,
            )  # fmt: skip
        slot, phase = advance(slot, phase, STAGES)

        left -= 1
        if (left == 0) | (tile + 1 == end):  # the part is over
            left = part_tiles
            if join < 0:
                whole_max, scale, part_scale = fold(whole_max, row_max)
                scales = scale[None, :] + gl.zeros_like(acc)
                whole_acc = gl.fma(whole_acc, scales, acc * part_scale[None, :])
                whole_sum = gl.fma(whole_sum, scales, row_sum * part_scale[None, :])
            else:
                part = join.to(gl.int64) * MAX_PARTS + tile // part_tiles
                indices = part * (NUM_KV * GROUP) + heads
                gl.store(partial_ptr + indices[None, :] * HEAD_DIM + dims[:, None], acc, mask=present)
                gl.store(maxima_ptr + indices, row_max, mask=group < GROUP)
                gl.store(sums_ptr + indices[None, :] + 0 * dims[:, None], row_sum, mask=present & (dims == 0)[:, None])
            acc, row_sum, row_max = _begin_part(tile + 1 == first_of_last, new_value, new_scores)

    if join < 0:
        out = whole_acc / gl.where(whole_sum > 0, whole_sum, 1.0)  # a row of padding gives zeros
        elements = (seq.to(gl.int64) * (NUM_KV * GROUP) + heads)[None, :] * HEAD_DIM + dims[:, None]
        gl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=present)
    return slot, phase


def is_supported(num_q_heads: int, kv_cache: Tensor) -> bool:
    """Whether a pool and the heads over it are of the kind that this is for; whether the GPU is, the caller knows."""
    block_size, num_kv, head_dim = kv_cache.shape[3:]
    fits = head_dim in (64, 128) and block_size >= 16 and TILE % block_size == 0
    return fits and num_q_heads <= MAX_GROUP * num_kv and kv_cache.element_size() == 2


def fused_decode_attention(
    qkv: Tensor,  # [num_seqs, (num_q_heads + 2 * num_kv_heads) * head_dim], contiguous
    weights: AttentionWeights,
    kv_cache: Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous
    layer_id: int,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32, the new token included; 0 is padding
    division: Division,  # of `seq_lens` and the pool's KV heads
    workspace: PartsWorkspace,
    *,
    programs_per_sm: int,
    pdl: bool = False,
) -> Tensor:
    """Write K and V of each sequence's last token to its slot, and attend: `[num_seqs, num_q_heads * head_dim]`.

    The token's position is `seq_len - 1`, its slot that position's in the block table. Padding gives zeros
    and writes nothing. With `pdl`, block tables, seq_lens, the division and all K and V but the new must be
    older than the kernel before this one. The fewer `programs_per_sm`, the more tiles each has on the way.
    """
    _check(qkv, weights, kv_cache, block_tables, seq_lens)
    num_seqs, num_q, head_dim = qkv.shape[0], weights.num_q_heads, weights.head_dim
    _, num_layers, _, block_size, num_kv, _ = kv_cache.shape
    out = torch.empty((num_seqs, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_seqs == 0:
        return out.flatten(1)
    check_room(workspace, division, num_q, head_dim)
    _fused_decode_attention_kernel[(min(division.items.shape[0] * num_kv, division.num_slots),)](
        qkv_ptr=qkv,
        q_norm_ptr=weights.rope if weights.q_norm is None else weights.q_norm,
        k_norm_ptr=weights.rope if weights.k_norm is None else weights.k_norm,
        rope_ptr=weights.rope,
        pool_desc=_descriptor(kv_cache),
        pool_ptr=kv_cache,
        block_tables_ptr=block_tables,
        items_ptr=division.items,
        counts_ptr=division.counts,
        out_ptr=out,
        partial_ptr=workspace.partial,
        maxima_ptr=workspace.maxima,
        sums_ptr=workspace.sums,
        eps=weights.norm_eps,
        scale_log2=head_dim**-0.5 * LOG2_E,
        table_stride=block_tables.stride(0),
        block_rows=num_layers * 2 * block_size,
        layer_row=layer_id * 2 * block_size,
        NUM_KV=num_kv,
        GROUP=num_q // num_kv,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(num_q // num_kv)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ITEM_WORDS=ITEM_WORDS,
        TILE=TILE,
        MAX_PARTS=MAX_PARTS,
        STAGES=STAGES_OF[programs_per_sm],
        HAS_NORM=weights.q_norm is not None,
        PDL=pdl,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
    )
    join_parts_of_contexts(out, division, workspace, pdl=pdl)
    return out.flatten(1)


def _descriptor(kv_cache: Tensor) -> TensorDescriptor:
    """The pool as rows of one token's K or V in a layer; a tile is one head of a block."""
    block_size, num_kv, head_dim = kv_cache.shape[3:]
    dtype = gl.float16 if kv_cache.dtype == torch.float16 else gl.bfloat16
    tile = [block_size, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return TensorDescriptor.from_tensor(kv_cache.view(-1, num_kv * head_dim), tile, layout)


def _check(qkv: Tensor, weights: AttentionWeights, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    num_seqs, num_q, num_kv, head_dim = qkv.shape[0], weights.num_q_heads, weights.num_kv_heads, weights.head_dim
    assert is_supported(num_q, kv_cache), f"{num_q} heads, pool {tuple(kv_cache.shape)} {kv_cache.dtype}: unsupported"
    assert kv_cache.shape[4:] == (num_kv, head_dim) and num_q % num_kv == 0, (
        f"pool {tuple(kv_cache.shape)}: heads differ"
    )
    assert kv_cache.is_contiguous(), f"pool strides {kv_cache.stride()}: contiguous needed"
    assert kv_cache.numel() // (num_kv * head_dim) < 1 << 31, "rows of the pool are counted in int32"
    assert qkv.dtype == kv_cache.dtype, f"qkv {qkv.dtype}, pool {kv_cache.dtype}: one dtype needed"
    check_qkv(qkv, weights)
    check_block_tables(block_tables, num_seqs)
    check_column("seq_lens", seq_lens, num_seqs)
