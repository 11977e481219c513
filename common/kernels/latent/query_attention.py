"""Causal absorbed attention of prompts over latents in blocks, where the host does not know the number of keys.

A program has some queries of a sequence, with up to 16 heads of each. These rows read a tile of latents once, as keys
and as values. Contexts are not cut, so there should be enough queries to fill a GPU (`decode_attention` cuts contexts).
Both products take 2,176 FLOP for a head and a pair of a query and a key, at rank 512: bound by products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import LOG2_E, NO_KEYS, attended, output_of
from common.kernels.base.checks import check_block_tables, check_column
from common.kernels.base.gpu import Gpu
from common.kernels.base.latent_operands import LatentWeights, Tiling
from common.kernels.base.ragged import max_seqs_for, num_tiles, tile_of
from common.kernels.latent.decode_attention import ROWS, num_groups
from common.kernels.latent.inputs import check_latents


def tiling_for(dtype: torch.dtype, shared_bytes: int) -> Tiling:
    """Return tiles that fit into a program's shared memory: a row and a key take 1,152 bytes each at rank 512."""
    if dtype == torch.float32:
        return Tiling(queries=1, keys=16, num_warps=4, num_stages=1)
    if shared_bytes < 160_000:
        return Tiling(queries=2, keys=16, num_warps=4, num_stages=2)
    return Tiling(queries=4, keys=32, num_warps=8, num_stages=3 if shared_bytes > 200_000 else 5)  # two tiles of keys


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _latent_query_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE], contiguous: absorbed, then rotated dimensions
    cache_ptr,  # [num_blocks, block_size, RANK + ROPE], strided
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_tokens, NUM_HEADS, RANK], contiguous
    scale_log2,  # softmax scale times log2(e)
    num_seqs,
    table_stride,
    stride_block,  # in elements, as is stride_token
    stride_token,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a program, at most ROWS
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: (query tiles, NUM_HEADS / GROUP). The last queries, which see most keys, come first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, token, token_end, first_token = tile_of(tile, cu_seqlens_ptr, tl.arange(0, MAX_SEQS), num_seqs, QUERIES)
    query_len, first_query = token_end - token, first_token - token
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    rows = tl.arange(0, QUERIES * ROWS)
    queries = first_query + rows // ROWS
    heads = rows % ROWS
    present = ((queries < query_len) & (heads < GROUP))[:, None]
    positions = seq_len - query_len + queries
    row_heads = (token + queries).to(tl.int64) * NUM_HEADS + tl.program_id(1) * GROUP + heads
    columns = tl.arange(0, RANK)[None, :]
    turned = RANK + tl.arange(0, ROPE)[None, :]
    q_ptrs = q_ptr + row_heads[:, None] * (RANK + ROPE)
    q = tl.load(q_ptrs + columns, mask=present, other=0.0)
    q_turned = tl.load(q_ptrs + turned, mask=present, other=0.0)

    no_acc = tl.zeros((QUERIES * ROWS, RANK), tl.float32)
    lowest = tl.full((QUERIES * ROWS,), NO_KEYS, tl.float32)
    state = (no_acc, lowest, tl.zeros((QUERIES * ROWS,), tl.float32))
    end = tl.minimum(seq_len, seq_len - query_len + first_query + QUERIES)
    for start in tl.range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        inside = keys < end
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        entry_ptrs = cache_ptr + (blocks * stride_block + (keys % BLOCK_SIZE) * stride_token)[:, None]
        latents = tl.load(entry_ptrs + columns, mask=inside[:, None], other=0.0)
        shared_keys = tl.load(entry_ptrs + turned, mask=inside[:, None], other=0.0)
        scores = tl.dot(q_turned, tl.trans(shared_keys), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
        seen = keys[None, :] <= positions[:, None]
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        state = attended(state, scores, latents)
    out = output_of(state).to(out_ptr.dtype.element_ty)  # a sequence of length 0 gives zeros
    tl.store(out_ptr + row_heads[:, None] * RANK + columns, out, mask=present)


def latent_query_attention(
    q: Tensor,  # [num_tokens, num_heads, rank + rope_dim], contiguous: absorbed
    cache: Tensor,  # [num_blocks, block_size, rank + rope_dim], strided
    weights: LatentWeights,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens: Tensor,  # [num_seqs + 1] int32
    seq_lens: Tensor,  # [num_seqs] int32, 0 for padding
    gpu: Gpu,
) -> Tensor:
    """Return weighted sums of latents: query i sees the first `seq_len - query_len + i + 1`.

    `[num_tokens, num_heads, rank]`; tokens of no sequence are not written.
    """
    num_tokens, num_seqs, num_heads, rank = q.shape[0], seq_lens.shape[0], weights.num_heads, weights.rank
    groups, tiling = num_groups(num_heads), tiling_for(q.dtype, gpu.shared_bytes)
    check_latents(cache, weights)
    check_block_tables(block_tables, num_seqs)
    check_column("cu_seqlens", cu_seqlens, num_seqs + 1)
    check_column("seq_lens", seq_lens, num_seqs)
    assert q.is_contiguous() and q.shape[1:] == (num_heads, cache.shape[2]), f"q {tuple(q.shape)}: absorbed needed"
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    _latent_query_kernel[(num_tiles(num_tokens, num_seqs, tiling.queries), groups)](
        q_ptr=q,
        cache_ptr=cache,
        block_tables_ptr=block_tables,
        cu_seqlens_ptr=cu_seqlens,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        scale_log2=weights.scale * LOG2_E,
        num_seqs=num_seqs,
        table_stride=block_tables.stride(0),
        stride_block=cache.stride(0),
        stride_token=cache.stride(1),
        NUM_HEADS=num_heads,
        GROUP=num_heads // groups,
        RANK=rank,
        ROPE=weights.rope_dim,
        BLOCK_SIZE=cache.shape[1],
        MAX_SEQS=max_seqs_for(num_seqs),
        QUERIES=tiling.queries,
        ROWS=ROWS,
        KEYS=tiling.keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out
