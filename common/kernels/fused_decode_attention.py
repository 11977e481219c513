"""All between two products of a decode step in one kernel: norms, RoPE, the write of K and V, and attention.

Each program attends one KV head of one sequence over a part of the context, as `decode_splits` divides it;
where there is more than one part, a second kernel joins them. A step writes one token a sequence, so the
keys of all others are there before it begins: their first tiles are on their way by the tensor memory
accelerator before the wait for the QKV projection. Then each program norms and rotates its queries itself;
that of the last part does so with the new key too, which it writes and attends from registers.

Keys are the tall operand of `wgmma` and queries the short one: a group is rarely more than eight heads.
Written in Gluon, Triton's lower layer, since there a copy can be begun in one place and awaited in
another. Hopper only, two bytes an element; Triton's interpreter does not run it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
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

from common.kernels.decode_splits import (
    LOG2_E,
    TILE,
    DecodeWorkspace,
    check_room,
    combine,
    divide_keys,
    num_splits_for,
)
from common.kernels.operands import AttentionWeights
from common.kernels.pdl import wait_for_predecessor

MIN_ROWS = 8  # columns of the smallest `wgmma`
MAX_GROUP = 16  # query heads of a KV head
NUM_WARPS = 4


@gluon.jit
def _load_tile(
    pool_desc,  # [num_blocks * block_rows, NUM_KV * HEAD_DIM], tiles of BLOCK_SIZE x HEAD_DIM
    table_ptr,  # of the sequence
    k_tile,  # [TILE, HEAD_DIM], shared memory
    v_tile,
    arrived,  # barrier of the two
    first_block,
    num_blocks,  # of the sequence
    block_rows,
    layer_row,
    column,
    pred,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Begin loading TILE keys and values; past the sequence's last block they are zero."""
    mbarrier.expect(arrived, 2 * TILE * HEAD_DIM * 2, pred=pred)
    for i in gl.static_range(TILE // BLOCK_SIZE):
        index = first_block + i
        # Row -1 of the table lies before the pool, where nothing is read and zeros arrive.
        block = gl.load(table_ptr + index, mask=index < num_blocks, other=-1)
        row = block * block_rows + layer_row
        k_slice = k_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        v_slice = v_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
        tma.async_copy_global_to_shared(pool_desc, [row, column], arrived, k_slice, pred=pred)
        tma.async_copy_global_to_shared(pool_desc, [row + BLOCK_SIZE, column], arrived, v_slice, pred=pred)


@gluon.jit
def _clear_end(v_tile, num_keys, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero what the block that the context ends in holds behind its end: it has weight 0, but may be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, layout))
    for i in gl.static_range(TILE // BLOCK_SIZE):
        left = num_keys - i * BLOCK_SIZE
        if (left > 0) & (left < BLOCK_SIZE):
            v_slice = v_tile.slice(i * BLOCK_SIZE, BLOCK_SIZE, dim=0)
            values = v_slice.load(layout)
            v_slice.store(gl.where((rows < left)[:, None], values, gl.zeros_like(values)))


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


@gluon.jit(do_not_specialize=["table_stride"])  # differs from batch to batch in a prefill worker
def _fused_decode_attention_kernel(
    qkv_ptr,  # [num_seqs, NUM_KV * (GROUP + 2), HEAD_DIM], contiguous
    q_norm_ptr,  # [HEAD_DIM]; anything if not HAS_NORM
    k_norm_ptr,  # the same
    rope_ptr,  # [max_positions, HEAD_DIM] fp32: cos, then sin
    pool_desc,  # [num_blocks * block_rows, NUM_KV * HEAD_DIM], tiles of BLOCK_SIZE x HEAD_DIM
    pool_ptr,  # the same memory
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_seqs, NUM_KV * GROUP, HEAD_DIM], contiguous; written here if NUM_SPLITS is 1
    partial_ptr,  # [num_seqs, NUM_KV * GROUP, NUM_SPLITS, HEAD_DIM] fp32
    lse_ptr,  # [num_seqs, NUM_KV * GROUP, NUM_SPLITS] fp32, in units of log2
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
    NUM_SPLITS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,  # tiles on the way at once
    HAS_NORM: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: (num_seqs, NUM_KV, NUM_SPLITS). One program a split of a sequence's keys, for one KV head."""
    HALF: gl.constexpr = HEAD_DIM // 2
    WIDTH: gl.constexpr = NUM_KV * HEAD_DIM
    dtype: gl.constexpr = pool_desc.dtype
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], dtype)
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    mma_rows: gl.constexpr = gl.SliceLayout(0, mma)  # queries
    mma_dims: gl.constexpr = gl.SliceLayout(1, mma)  # keys, or dimensions of values
    halves: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [num_warps, 1], [1, 0])

    seq = gl.program_id(0)
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    seq_len = gl.load(seq_lens_ptr + seq)
    split_keys, num_live = divide_keys(seq_len, NUM_SPLITS, TILE)
    # The first split stays even without keys: were no program to wait, the next kernel could overtake the one before.
    if split >= gl.maximum(num_live, 1):
        return

    past = gl.maximum(seq_len - 1, 0)  # keys of earlier steps, and so the new one's position
    begin = split * split_keys
    num_tiles = (gl.minimum(past - begin, split_keys) + TILE - 1) // TILE  # none if the new key is the only one
    num_blocks = (past + BLOCK_SIZE - 1) // BLOCK_SIZE
    table_ptr = block_tables_ptr + seq.to(gl.int64) * table_stride
    column = kv_head * HEAD_DIM
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], ring_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], ring_layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        _load_tile(
            pool_desc, table_ptr, k_ring.index(stage), v_ring.index(stage), arrived.index(stage),
            begin // BLOCK_SIZE + stage * (TILE // BLOCK_SIZE), num_blocks, block_rows, layer_row, column,
            stage < num_tiles, BLOCK_SIZE, TILE, HEAD_DIM,
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
    q_smem = gl.allocate_shared_memory(
        dtype, [ROWS, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    )
    q_smem.slice(0, HALF, dim=1).store(q_low)
    q_smem.slice(HALF, HALF, dim=1).store(q_high)
    fence_async_shared()
    tl.debug_barrier()

    has_new = split == num_live - 1
    if has_new:
        slot_row = new_block.to(gl.int64) * block_rows + layer_row + past % BLOCK_SIZE
        slot_ptr = pool_ptr + slot_row * WIDTH + column
        gl.store(slot_ptr + columns, k_low)
        gl.store(slot_ptr + HALF + columns, k_high)
        gl.store(slot_ptr + BLOCK_SIZE * WIDTH + dims, new_v)
    products = q_low.to(gl.float32) * k_low.to(gl.float32) + q_high.to(gl.float32) * k_high.to(gl.float32)
    new_scores = gl.convert_layout(gl.sum(products, axis=1), mma_rows) * scale_log2
    row_max = gl.where(has_new, new_scores, -1e38)  # finite, since a row of padding has no keys
    row_sum = gl.where(has_new, gl.full([ROWS], 1.0, gl.float32, mma_rows), 0.0)
    acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, mma) + gl.where(has_new, new_v.to(gl.float32), 0.0)[:, None]

    p_smem = gl.allocate_shared_memory(dtype, [ROWS, TILE], gl.NVMMASharedLayout.get_default_for([ROWS, TILE], dtype))
    zero = gl.zeros([TILE, ROWS], gl.float32, mma)
    tile_keys = gl.arange(0, TILE, mma_dims)
    slot = 0
    phase = 0
    for tile in range(num_tiles):
        num_keys = past - begin - tile * TILE  # of this tile and those behind it
        mbarrier.wait(arrived.index(slot), phase)
        scores = warpgroup_mma(k_ring.index(slot), q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if num_keys < TILE:
            _clear_end(v_ring.index(slot), num_keys, BLOCK_SIZE, TILE, HEAD_DIM)
        scores = gl.where((tile_keys < num_keys)[:, None], scores * scale_log2, -1e38)
        new_max = gl.maximum(row_max, gl.max(scores, axis=0))
        weights = gl.exp2(scores - new_max[None, :])
        decay = gl.exp2(row_max - new_max)
        row_sum = row_sum * decay + gl.sum(weights, axis=0)
        row_max = new_max
        p_smem.permute((1, 0)).store(weights.to(dtype))
        fence_async_shared()
        tl.debug_barrier()
        acc = warpgroup_mma(
            v_ring.index(slot).permute((1, 0)), p_smem.permute((1, 0)), acc * decay[None, :], is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        if tile + STAGES < num_tiles:
            _load_tile(
                pool_desc, table_ptr, k_ring.index(slot), v_ring.index(slot), arrived.index(slot),
                (begin + (tile + STAGES) * TILE) // BLOCK_SIZE, num_blocks, block_rows, layer_row, column,
                True, BLOCK_SIZE, TILE, HEAD_DIM,
            )  # fmt: skip
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    out = acc / gl.where(row_sum > 0, row_sum, 1.0)[None, :]  # a row of padding gives zeros
    group = gl.arange(0, ROWS, mma_rows)
    present = (group < GROUP)[None, :]
    heads = seq.to(gl.int64) * (NUM_KV * GROUP) + kv_head * GROUP + group  # [ROWS], over all sequences
    if NUM_SPLITS == 1:
        elements = heads[None, :] * HEAD_DIM + dims[:, None]
        gl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=present)
    else:
        parts = heads * NUM_SPLITS + split
        gl.store(partial_ptr + parts[None, :] * HEAD_DIM + dims[:, None], out, mask=present)
        gl.store(lse_ptr + parts, row_max + gl.log2(row_sum), mask=group < GROUP)


def is_supported(num_q_heads: int, kv_cache: Tensor) -> bool:
    """Whether a pool and the heads over it are of the kind that this is for; whether the GPU is, the caller knows."""
    block_size, num_kv, head_dim = kv_cache.shape[3:]
    fits = head_dim in (64, 128) and block_size >= 16 and TILE % block_size == 0
    return fits and num_q_heads <= MAX_GROUP * num_kv and kv_cache.element_size() == 2


@dataclass(frozen=True, slots=True)
class Division:
    """How the contexts of a batch are divided over programs."""

    num_splits: int
    stages: int  # tiles on the way at once: with 2, three programs share a multiprocessor, with 3 two


def division_for(num_seqs: int, num_kv_heads: int, num_sms: int) -> Division:
    """As few splits as keep all multiprocessors busy; without any, nothing is to be combined."""
    programs = num_seqs * num_kv_heads
    if 2 * programs < 3 * num_sms:
        return Division(num_splits_for(num_seqs, num_kv_heads, num_sms), stages=2)
    three_an_sm_are_a_wave = 11 * num_sms <= 4 * programs <= 12 * num_sms
    return Division(1, stages=2 if three_an_sm_are_a_wave else 3)


def fused_decode_attention(
    qkv: Tensor,  # [num_seqs, (num_q_heads + 2 * num_kv_heads) * head_dim], contiguous
    weights: AttentionWeights,
    kv_cache: Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], contiguous
    layer_id: int,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32, the new token included; 0 is padding
    workspace: DecodeWorkspace,
    *,
    pdl: bool = False,
    division: Division | None = None,
) -> Tensor:
    """Write K and V of each sequence's last token to its slot, and attend: `[num_seqs, num_q_heads * head_dim]`.

    The token's position is `seq_len - 1`, its slot that position's in the block table. Padding gives zeros
    and writes nothing. With `pdl`, block tables, seq_lens and all K and V but the new must be older than the
    kernel before this one. `division`: by default what is best for the batch.
    """
    _check(qkv, weights, kv_cache, block_tables, seq_lens)
    num_seqs, num_q, head_dim = qkv.shape[0], weights.num_q_heads, weights.head_dim
    _, num_layers, _, block_size, num_kv, _ = kv_cache.shape
    out = torch.empty((num_seqs, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_seqs == 0:
        return out.flatten(1)
    division = division or division_for(num_seqs, num_kv, workspace.num_sms)
    num_splits = division.num_splits
    check_room(workspace, num_seqs, num_q, num_splits, head_dim)
    _fused_decode_attention_kernel[(num_seqs, num_kv, num_splits)](
        qkv_ptr=qkv,
        q_norm_ptr=weights.rope if weights.q_norm is None else weights.q_norm,
        k_norm_ptr=weights.rope if weights.k_norm is None else weights.k_norm,
        rope_ptr=weights.rope,
        pool_desc=_descriptor(kv_cache),
        pool_ptr=kv_cache,
        block_tables_ptr=block_tables,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        partial_ptr=workspace.partial,
        lse_ptr=workspace.lse,
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
        NUM_SPLITS=num_splits,
        TILE=TILE,
        STAGES=division.stages,
        HAS_NORM=weights.q_norm is not None,
        PDL=pdl,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
    )
    if num_splits > 1:
        combine(out, seq_lens, workspace, num_splits, pdl=pdl)
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
    width = (num_q + 2 * num_kv) * head_dim
    assert is_supported(num_q, kv_cache), f"{num_q} heads, pool {tuple(kv_cache.shape)} {kv_cache.dtype}: unsupported"
    assert kv_cache.shape[4:] == (num_kv, head_dim) and num_q % num_kv == 0, (
        f"pool {tuple(kv_cache.shape)}: heads differ"
    )
    assert kv_cache.is_contiguous(), f"pool strides {kv_cache.stride()}: contiguous needed"
    assert kv_cache.numel() // (num_kv * head_dim) < 1 << 31, "rows of the pool are counted in int32"
    assert qkv.shape == (num_seqs, width) and qkv.is_contiguous(), f"qkv {tuple(qkv.shape)}: width {width} needed"
    assert qkv.dtype == kv_cache.dtype, f"qkv {qkv.dtype}, pool {kv_cache.dtype}: one dtype needed"
    assert (weights.q_norm is None) == (weights.k_norm is None), "q_norm and k_norm come together"
    for norm in (weights.q_norm, weights.k_norm):
        assert norm is None or (norm.shape == (head_dim,) and norm.is_contiguous()), "a norm weight is [head_dim]"
    assert weights.rope.dtype == torch.float32 and weights.rope.is_contiguous(), "rope is contiguous fp32"
    assert weights.rope.shape[1] == head_dim, f"rope {tuple(weights.rope.shape)}: {head_dim} columns needed"
    assert block_tables.shape[0] == num_seqs and block_tables.stride(1) == 1, "block_tables are [num_seqs, max_blocks]"
    assert seq_lens.shape == (num_seqs,), f"seq_lens {tuple(seq_lens.shape)}: one a row needed"
    for ids in (block_tables, seq_lens):
        assert ids.dtype == torch.int32, f"{ids.dtype}: block_tables and seq_lens are int32"
