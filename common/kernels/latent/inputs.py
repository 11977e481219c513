"""Work between the products into latent attention and attention: norm, rotations, the write of latents, absorption.

Both kernels rotate queries and write latents; `absorb_queries` multiplies queries with the rows of keys, too. Rotation
is bound by memory: a few kilobytes a token. Absorption reads `num_heads * nope_dim * rank` weights, 2 MB for
DeepSeek-V2-Lite, and is bound by them up to about 200 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_column
from common.kernels.base.latent_operands import MIN_DIM, LatentWeights, are_computed
from common.kernels.base.pdl import wait_for_predecessor

TOKENS = 16  # of a program: rows of a matrix product on tensor cores
RANK_TILE = 64  # columns of a program that absorbs


@triton.jit
def _write_latents(
    kv_ptr,  # [num_tokens, RANK + ROPE], rows kv_stride apart
    norm_ptr,  # [RANK]
    rope_ptr,  # [max_positions, ROPE] fp32: cos, then sin
    cache_ptr,  # [num_blocks, block_size, RANK + ROPE], strided
    tokens,  # [TOKENS] int64
    slots,  # [TOKENS] int64, -1 for tokens that are not written
    positions,  # [TOKENS] int64
    kv_stride,
    stride_block,
    stride_token,
    eps,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    HALF: tl.constexpr = ROPE // 2
    kept = (slots >= 0)[:, None]
    source_ptr = kv_ptr + (tokens * kv_stride)[:, None]
    in_cache = (slots // BLOCK_SIZE) * stride_block + (slots % BLOCK_SIZE) * stride_token
    target_ptr = cache_ptr + in_cache[:, None]
    columns = tl.arange(0, RANK)[None, :]
    latents = tl.load(source_ptr + columns, mask=kept, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latents * latents, axis=1) / RANK + eps)[:, None]
    latents = latents * scale * tl.load(norm_ptr + columns).to(tl.float32)
    tl.store(target_ptr + columns, latents.to(cache_ptr.dtype.element_ty), mask=kept)
    low, high = _rotated(source_ptr + RANK, rope_ptr, positions, kept, ROPE)
    columns = RANK + tl.arange(0, HALF)[None, :]
    tl.store(target_ptr + columns, low.to(cache_ptr.dtype.element_ty), mask=kept)
    tl.store(target_ptr + HALF + columns, high.to(cache_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _rotated(source_ptrs, rope_ptr, positions, kept, ROPE: tl.constexpr):
    """Load and rotate both halves of `[TOKENS, ROPE]`; `source_ptrs [TOKENS, 1]`. Returns fp32."""
    HALF: tl.constexpr = ROPE // 2
    columns = tl.arange(0, HALF)[None, :]
    a = tl.load(source_ptrs + columns, mask=kept, other=0.0).to(tl.float32)
    b = tl.load(source_ptrs + HALF + columns, mask=kept, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + positions[:, None] * ROPE + columns)
    sin = tl.load(rope_ptr + positions[:, None] * ROPE + HALF + columns)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _tokens_of(tile, slots_ptr, positions_ptr, num_tokens, TOKENS: tl.constexpr):
    """Return numbers, slots and positions of a tile's tokens: slot -1 and position 0 for padding."""
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    positions = tl.load(positions_ptr + tokens, mask=slots >= 0, other=0)
    return tokens.to(tl.int64), slots, positions.to(tl.int64)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_latent_queries_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, NOPE + ROPE], rows q_stride apart: changed in place
    kv_ptr,  # [num_tokens, RANK + ROPE], rows kv_stride apart
    norm_ptr,
    rope_ptr,
    factors_ptr,  # [max_positions] fp32, of queries, or None
    positions_ptr,  # [num_tokens] int32
    slots_ptr,  # [num_tokens] int64
    cache_ptr,
    num_tokens,
    q_stride,
    kv_stride,
    stride_block,
    stride_token,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: (token tiles, NUM_HEADS + 1). A program rotates a head of a tile of tokens; the last writes latents."""
    head = tl.program_id(1)
    tokens, slots, positions = _tokens_of(tl.program_id(0), slots_ptr, positions_ptr, num_tokens, TOKENS)
    if head == NUM_HEADS:
        _write_latents(
            kv_ptr, norm_ptr, rope_ptr, cache_ptr, tokens, slots, positions, kv_stride, stride_block, stride_token, eps,
            RANK, ROPE, BLOCK_SIZE,
        )  # fmt: skip
    else:
        kept = (tokens < num_tokens)[:, None]
        head_ptrs = q_ptr + (tokens * q_stride + head * (NOPE + ROPE))[:, None]
        low, high = _rotated(head_ptrs + NOPE, rope_ptr, positions, kept, ROPE)
        if factors_ptr is not None:
            factors = tl.load(factors_ptr + positions)[:, None]
            low, high = low * factors, high * factors
            columns = tl.arange(0, NOPE)[None, :]
            still = tl.load(head_ptrs + columns, mask=kept, other=0.0).to(tl.float32) * factors
            tl.store(head_ptrs + columns, still.to(q_ptr.dtype.element_ty), mask=kept)
        columns = NOPE + tl.arange(0, ROPE // 2)[None, :]
        tl.store(head_ptrs + columns, low.to(q_ptr.dtype.element_ty), mask=kept)
        tl.store(head_ptrs + ROPE // 2 + columns, high.to(q_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_tokens"])
def _absorb_queries_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, NOPE + ROPE], rows q_stride apart
    kv_ptr,  # [num_tokens, RANK + ROPE], rows kv_stride apart; anything if not NEW
    expand_ptr,  # [NUM_HEADS, NOPE + values, RANK], heads head_stride apart
    norm_ptr,
    rope_ptr,
    factors_ptr,  # [max_positions] fp32, of queries, or None
    positions_ptr,  # [num_tokens] int32; anything if not NEW, as are slots
    slots_ptr,  # [num_tokens] int64
    cache_ptr,
    out_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE], contiguous
    num_tokens,
    q_stride,
    kv_stride,
    head_stride,
    stride_block,
    stride_token,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEW: tl.constexpr,  # queries are to be rotated, and latents to be written
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (token tiles, NUM_HEADS * RANK / RANK_TILE + NEW).

    A program computes RANK_TILE columns of a head; the first of each head copies the rotated dimensions. The last
    program of a tile of tokens writes their latents.
    """
    TILES: tl.constexpr = RANK // RANK_TILE
    head = tl.program_id(1) // TILES
    column = tl.program_id(1) % TILES * RANK_TILE
    dims = tl.arange(0, NOPE)
    columns = column + tl.arange(0, RANK_TILE)
    weights_ptr = expand_ptr + head * head_stride + dims[:, None] * RANK + columns[None, :]
    keys = tl.load(weights_ptr, mask=(dims < NOPE)[:, None] & (head < NUM_HEADS), other=0.0)
    wait_for_predecessor(PDL)
    if NEW:
        tokens, slots, positions = _tokens_of(tl.program_id(0), slots_ptr, positions_ptr, num_tokens, TOKENS)
    else:
        tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        slots, positions = tokens, tokens
    if head == NUM_HEADS:
        _write_latents(
            kv_ptr, norm_ptr, rope_ptr, cache_ptr, tokens, slots, positions, kv_stride, stride_block, stride_token, eps,
            RANK, ROPE, BLOCK_SIZE,
        )  # fmt: skip
    else:
        kept = (tokens < num_tokens)[:, None]
        head_ptrs = q_ptr + (tokens * q_stride + head * (NOPE + ROPE))[:, None]
        out_ptrs = out_ptr + ((tokens * NUM_HEADS + head) * (RANK + ROPE))[:, None]
        q = tl.load(head_ptrs + dims[None, :], mask=kept, other=0.0)
        absorbed = tl.dot(q, keys, input_precision="ieee")
        if factors_ptr is not None:
            absorbed *= tl.load(factors_ptr + positions)[:, None]
        tl.store(out_ptrs + columns[None, :], absorbed.to(out_ptr.dtype.element_ty), mask=kept)
        if column == 0:
            halves = tl.arange(0, ROPE // 2)[None, :]
            if NEW:
                low, high = _rotated(head_ptrs + NOPE, rope_ptr, positions, kept, ROPE)
                if factors_ptr is not None:
                    factors = tl.load(factors_ptr + positions)[:, None]
                    low, high = low * factors, high * factors
            else:
                low = tl.load(head_ptrs + NOPE + halves, mask=kept, other=0.0).to(tl.float32)
                high = tl.load(head_ptrs + NOPE + ROPE // 2 + halves, mask=kept, other=0.0).to(tl.float32)
            tl.store(out_ptrs + RANK + halves, low.to(out_ptr.dtype.element_ty), mask=kept)
            tl.store(out_ptrs + RANK + ROPE // 2 + halves, high.to(out_ptr.dtype.element_ty), mask=kept)


def rotate_latent_queries(
    q: Tensor,  # [num_tokens, num_heads * query_dim], contiguous columns; changed in place
    kv: Tensor,  # [num_tokens, rank + rope_dim], contiguous columns
    weights: LatentWeights,
    positions: Tensor,  # [num_tokens] int32
    slots: Tensor,  # [num_tokens] int64; -1 writes nothing
    cache: Tensor,  # [num_blocks, block_size, rank + rope_dim], strided
) -> Tensor:
    """Write each token's latent and key to its slot, rotate queries: `[num_tokens, num_heads, query_dim]`, a view."""
    _check(q, kv, weights, positions, slots, cache)
    num_tokens, num_heads = q.shape[0], weights.num_heads
    if num_tokens:
        _rotate_latent_queries_kernel[(triton.cdiv(num_tokens, TOKENS), num_heads + 1)](
            q_ptr=q,
            kv_ptr=kv,
            norm_ptr=weights.norm,
            rope_ptr=weights.rope,
            factors_ptr=weights.query_factors,
            positions_ptr=positions,
            slots_ptr=slots,
            cache_ptr=cache,
            num_tokens=num_tokens,
            q_stride=q.stride(0),
            kv_stride=kv.stride(0),
            stride_block=cache.stride(0),
            stride_token=cache.stride(1),
            eps=weights.norm_eps,
            NUM_HEADS=num_heads,
            NOPE=weights.nope_dim,
            ROPE=weights.rope_dim,
            RANK=weights.rank,
            BLOCK_SIZE=cache.shape[1],
            TOKENS=TOKENS,
            num_warps=4,
        )
    return q.view(num_tokens, num_heads, weights.query_dim)


def absorb_new_queries(
    q: Tensor,
    kv: Tensor,
    weights: LatentWeights,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Do `rotate_latent_queries` without change of `q`; return absorbed queries.

    `[num_tokens, num_heads, rank + rope_dim]`: products with latents, then rotated dimensions.
    """
    _check(q, kv, weights, positions, slots, cache)
    return _absorb(q, kv, weights, positions, slots, cache, is_new=True, pdl=pdl)


def absorb_queries(q: Tensor, weights: LatentWeights) -> Tensor:
    """Return absorbed queries for rotated `q [num_tokens, num_heads * query_dim]`, as `absorb_new_queries` does."""
    _check_queries(q, weights)
    return _absorb(q, q, weights, q, q, q.view(1, *q.shape), is_new=False, pdl=False)


def _absorb(
    q: Tensor,
    kv: Tensor,
    weights: LatentWeights,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    is_new: bool,
    pdl: bool,
) -> Tensor:
    num_tokens, num_heads, rank = q.shape[0], weights.num_heads, weights.rank
    out = torch.empty((num_tokens, num_heads, rank + weights.rope_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    rank_tile = min(rank, RANK_TILE)
    _absorb_queries_kernel[(triton.cdiv(num_tokens, TOKENS), num_heads * (rank // rank_tile) + is_new)](
        q_ptr=q,
        kv_ptr=kv,
        expand_ptr=weights.expand,
        norm_ptr=weights.norm,
        rope_ptr=weights.rope,
        factors_ptr=weights.query_factors if is_new else None,
        positions_ptr=positions,
        slots_ptr=slots,
        cache_ptr=cache,
        out_ptr=out,
        num_tokens=num_tokens,
        q_stride=q.stride(0),
        kv_stride=kv.stride(0),
        head_stride=weights.expand.stride(0),
        stride_block=cache.stride(0),
        stride_token=cache.stride(1),
        eps=weights.norm_eps,
        NUM_HEADS=num_heads,
        NOPE=weights.nope_dim,
        ROPE=weights.rope_dim,
        RANK=rank,
        RANK_TILE=rank_tile,
        BLOCK_SIZE=cache.shape[1],
        NEW=is_new,
        TOKENS=TOKENS,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


def _check_queries(q: Tensor, weights: LatentWeights) -> None:
    width = weights.num_heads * weights.query_dim
    assert q.ndim == 2 and q.shape[1] == width and q.stride(1) == 1, (
        f"q {tuple(q.shape)} with strides {q.stride()}: contiguous columns, {width} needed"
    )
    dims = (weights.rank, weights.nope_dim, weights.rope_dim, weights.value_dim)
    assert are_computed(*dims), f"dimensions {dims}: powers of two needed, at least {MIN_DIM}"
    expand = weights.expand
    assert expand.is_contiguous() and expand.dtype == q.dtype, f"expand: contiguous, of {q.dtype} needed"


def _check(q: Tensor, kv: Tensor, weights: LatentWeights, positions: Tensor, slots: Tensor, cache: Tensor) -> None:
    num_tokens, width = q.shape[0], weights.rank + weights.rope_dim
    _check_queries(q, weights)
    assert kv.shape == (num_tokens, width) and kv.stride(1) == 1, (
        f"kv {tuple(kv.shape)} with strides {kv.stride()}: [{num_tokens}, {width}], contiguous columns needed"
    )
    check_column("positions", positions, num_tokens)
    check_column("slots", slots, num_tokens, torch.int64)
    check_latents(cache, weights)
    assert weights.norm.shape == (weights.rank,) and weights.norm.is_contiguous(), "norm: [rank] needed"
    assert weights.rope.dtype == torch.float32 and weights.rope.is_contiguous(), "rope: contiguous fp32 needed"


def check_latents(cache: Tensor, weights: LatentWeights) -> None:
    """Require a cache `[num_blocks, block_size, rank + rope_dim]` with contiguous entries."""
    width = weights.rank + weights.rope_dim
    assert cache.ndim == 3 and cache.shape[2] == width and cache.stride(2) == 1, (
        f"cache {tuple(cache.shape)} with strides {cache.stride()}: contiguous entries of {width} needed"
    )
