"""Absorbed attention of one token a sequence over latents; programs compute items of a division (`decode_division`).

A token's entry is read once: the latent is key and value of all heads, so its tile serves both products. DeepSeek-V2's
16 heads make a tile of rows: 1,152 bytes and 35 kFLOP for each token of context, or 30 FLOP a byte. That is bound by
memory. More heads are groups of at most 16, each of which reads the latents again, mostly from the second-level cache.
So 64 heads are bound by that cache, and 128 by the cache or by products.

Parts, and their joining, are those of `decode_parts`, but each part is stored alone. Parts of a context are joined from
first to last, so the result does not depend on the number of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_division import ITEM_WORDS, limits_for, load_item, load_join, next_item
from common.kernels.attention.decode_parts import (
    LOG2_E,
    MAX_PARTS,
    NO_KEYS,
    PART_TILES,
    TILE,
    PartsWorkspace,
    attended,
    check_room,
    folded,
    num_tiles_of,
    output_of,
    part_tiles_of,
)
from common.kernels.base.attention_operands import Division
from common.kernels.base.checks import check_block_tables, check_column
from common.kernels.base.gpu import Gpu
from common.kernels.base.last_program import is_last
from common.kernels.base.latent_operands import LatentWeights, Tiling
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.latent.inputs import check_latents

ROWS = 16  # of a matrix product on tensor cores: heads of a group, at most
PROGRAMS_PER_SM = 1


def tiling_for(dtype: torch.dtype, shared_bytes: int) -> Tiling:
    """Return tiles that fit into a program's shared memory: a key takes 1,152 bytes in 16 bits at rank 512."""
    if dtype == torch.float32:
        return Tiling(keys=16, num_warps=4, num_stages=1)
    if shared_bytes < 160_000:
        return Tiling(keys=32, num_warps=4, num_stages=2)
    return Tiling(keys=64 if shared_bytes > 200_000 else 32, num_warps=8, num_stages=5)


@triton.jit(do_not_specialize=["table_stride", "layer_id"])
def _latent_decode_kernel(
    q_ptr,  # [num_rows, NUM_HEADS, RANK + ROPE], contiguous: absorbed, then rotated dimensions
    cache_ptr,  # [num_blocks, block_size, RANK + ROPE], strided
    block_tables_ptr,  # [num_rows, max_blocks] int32, rows table_stride apart
    items_ptr,  # [max_items, ITEM_WORDS] int32, of `Division`
    counts_ptr,  # [1 + num_layers] int32, of `Division`
    out_ptr,  # [num_rows, NUM_HEADS, RANK], contiguous
    partial_ptr,  # [max_joins, MAX_PARTS, NUM_HEADS, RANK] fp32, of `PartsWorkspace`
    maxima_ptr,  # [max_joins, MAX_PARTS, NUM_HEADS] fp32
    sums_ptr,  # [max_joins, MAX_PARTS, NUM_HEADS] fp32
    arrivals_ptr,  # [max_joins, GROUPS] int32
    layer_id,
    scale_log2,  # softmax scale times log2(e)
    table_stride,
    stride_block,  # in elements, as is stride_token
    stride_token,
    NUM_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,  # of heads, each of at most ROWS
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # divides TILE
    ITEM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    PART_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: any number. Each program has an item of a group of heads, and draws another after each item."""
    GROUP: tl.constexpr = NUM_HEADS // GROUPS
    STEPS: tl.constexpr = TILE // KEYS
    num_items = tl.load(counts_ptr) * GROUPS
    index = tl.program_id(0)
    while index < num_items:
        item_ptr = items_ptr + index // GROUPS * ITEM_WORDS
        head_group = index % GROUPS
        seq, seq_len, begin, end, join, _unit_parts = load_item(item_ptr)
        part_tiles = part_tiles_of(num_tiles_of(seq_len, TILE), PART_TILES, MAX_PARTS)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        wait_for_predecessor(PDL)

        group = tl.arange(0, ROWS)
        present = group < GROUP
        columns = tl.arange(0, RANK)[None, :]
        turned = RANK + tl.arange(0, ROPE)[None, :]
        heads = head_group * GROUP + group  # [ROWS], of the sequence
        row_heads = seq.to(tl.int64) * NUM_HEADS + heads  # over all sequences
        q_ptrs = q_ptr + row_heads[:, None] * (RANK + ROPE)
        q = tl.load(q_ptrs + columns, mask=present[:, None], other=0.0)
        q_turned = tl.load(q_ptrs + turned, mask=present[:, None], other=0.0)

        no_acc = tl.zeros((ROWS, RANK), tl.float32)
        lowest = tl.full((ROWS,), NO_KEYS, tl.float32)
        no_sum = tl.zeros((ROWS,), tl.float32)
        nothing = (no_acc, lowest, no_sum)
        part = nothing
        whole = nothing  # parts of the context joined so far
        first_unit = join.to(tl.int64) * (MAX_PARTS * NUM_HEADS)
        for step in tl.range(begin * STEPS, end * STEPS):
            keys = step * KEYS + tl.arange(0, KEYS)
            inside = keys < seq_len
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            entry_ptrs = cache_ptr + (blocks * stride_block + (keys % BLOCK_SIZE) * stride_token)[:, None]
            latents = tl.load(entry_ptrs + columns, mask=inside[:, None], other=0.0)
            shared_keys = tl.load(entry_ptrs + turned, mask=inside[:, None], other=0.0)
            scores = tl.dot(q_turned, tl.trans(shared_keys), input_precision="ieee")
            scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
            scores = tl.where(inside[None, :], scores * scale_log2, float("-inf"))
            part = attended(part, scores, latents)
            if ((step + 1) % (part_tiles * STEPS) == 0) | (step + 1 == end * STEPS):  # the part ends
                if join < 0:
                    whole = folded(whole, part, 1)
                else:
                    acc, row_max, row_sum = part
                    indices = first_unit + step // (part_tiles * STEPS) * NUM_HEADS + heads
                    tl.store(partial_ptr + indices[:, None] * RANK + columns, acc, mask=present[:, None])
                    tl.store(maxima_ptr + indices, row_max, mask=present)
                    tl.store(sums_ptr + indices, row_sum, mask=present)
                part = nothing

        out_ptrs = out_ptr + row_heads[:, None] * RANK + columns
        if join < 0:
            tl.store(out_ptrs, output_of(whole).to(out_ptr.dtype.element_ty), mask=present[:, None])
        else:
            num_joined, _ = load_join(item_ptr)
            if is_last(arrivals_ptr + join * GROUPS + head_group, num_joined):
                whole = nothing
                for index in range(tl.cdiv(num_tiles_of(seq_len, TILE), part_tiles)):
                    indices = first_unit + index * NUM_HEADS + heads
                    acc = tl.load(partial_ptr + indices[:, None] * RANK + columns, mask=present[:, None], other=0.0)
                    row_max = tl.load(maxima_ptr + indices, mask=present, other=NO_KEYS)
                    row_sum = tl.load(sums_ptr + indices, mask=present, other=0.0)
                    whole = folded(whole, (acc, row_max, row_sum), 1)
                tl.store(out_ptrs, output_of(whole).to(out_ptr.dtype.element_ty), mask=present[:, None])
        index = next_item(counts_ptr + 1 + layer_id, num_items)


def num_groups(num_heads: int) -> int:
    """Return the number of equal groups of at most ROWS heads; each group is to a division what a KV head is."""
    return next(groups for groups in range(-(-num_heads // ROWS), num_heads + 1) if num_heads % groups == 0)


def latent_parts_bytes(num_rows: int, num_heads: int, rank: int, gpu: Gpu) -> int:
    """Return the bytes of a workspace for steps of `num_rows` rows."""
    max_joins = limits_for(num_rows, num_groups(num_heads), PROGRAMS_PER_SM * gpu.num_sms).max_joins
    return max_joins * MAX_PARTS * num_heads * (rank + 2) * 4


def latent_decode_attention(
    q: Tensor,  # [num_rows, num_heads, rank + rope_dim], contiguous: absorbed
    cache: Tensor,  # [num_blocks, block_size, rank + rope_dim], strided
    weights: LatentWeights,
    block_tables: Tensor,  # [num_rows, max_blocks] int32
    seq_lens: Tensor,  # [num_rows] int32; 0 is padding
    division: Division,  # of `seq_lens` and the groups of heads
    workspace: PartsWorkspace,
    layer_id: int,
    gpu: Gpu,
    *,
    pdl: bool = False,
) -> Tensor:
    """Return weighted sums of the `seq_len` latents of each row: `[num_rows, num_heads, rank]`, padding 0."""
    num_rows, num_heads, rank = q.shape[0], weights.num_heads, weights.rank
    groups, tiling = num_groups(num_heads), tiling_for(q.dtype, gpu.shared_bytes)
    check_latents(cache, weights)
    check_block_tables(block_tables, num_rows)
    check_column("seq_lens", seq_lens, num_rows)
    assert q.is_contiguous() and q.shape[1:] == (num_heads, cache.shape[2]), f"q {tuple(q.shape)}: absorbed needed"
    out = torch.empty((num_rows, num_heads, rank), dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    check_room(workspace, division, num_heads, groups, rank)
    _latent_decode_kernel[(min(division.items.shape[0] * groups, division.num_slots),)](
        q_ptr=q,
        cache_ptr=cache,
        block_tables_ptr=block_tables,
        items_ptr=division.items,
        counts_ptr=division.counts,
        out_ptr=out,
        partial_ptr=workspace.partial,
        maxima_ptr=workspace.maxima,
        sums_ptr=workspace.sums,
        arrivals_ptr=workspace.arrivals,
        layer_id=layer_id,
        scale_log2=weights.scale * LOG2_E,
        table_stride=block_tables.stride(0),
        stride_block=cache.stride(0),
        stride_token=cache.stride(1),
        NUM_HEADS=num_heads,
        GROUPS=groups,
        RANK=rank,
        ROPE=weights.rope_dim,
        BLOCK_SIZE=cache.shape[1],
        ROWS=ROWS,
        KEYS=tiling.keys,
        ITEM_WORDS=ITEM_WORDS,
        TILE=TILE,
        PART_TILES=PART_TILES,
        MAX_PARTS=MAX_PARTS,
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=pdl,
    )
    return out
