"""Fusion of all work between the QKV projection and attention: norms, RoPE, and the write of K and V.

Tiles of heads never straddle the borders between q, k and v, so each program does one kind of work.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.checks import check_caches, check_column, check_qkv
from common.kernels.base.e4m3 import is_e4m3, narrowed
from common.kernels.base.pdl import wait_for_predecessor

MAX_HEADS = 8  # heads of a tile; more spills registers, less leaves a program too little work
MAX_ELEMENTS = 2048  # of a tile
LOW_LATENCY_TOKENS = 32  # up to here a program takes one head, to spread a decode step over the whole GPU


@triton.jit
def _qk_norm_rope_kv_kernel(
    qkv_ptr,  # [num_tokens, num_q + 2 * num_kv, head_dim], contiguous; no heads of V if SHARES_KV
    q_norm_ptr,  # [head_dim]
    k_norm_ptr,  # [head_dim]
    bias_ptr,  # [num_q + 2 * num_kv, head_dim], heads as in qkv; anything if not HAS_BIAS
    rope_ptr,  # [max_positions, head_dim] fp32: cos, then sin
    factors_ptr,  # [max_positions] fp32, of queries, or None
    positions_ptr,  # [num_tokens] int32
    slot_mapping_ptr,  # [num_tokens] int64, -1 for padding
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # as k_cache_ptr
    q_out_ptr,  # [num_tokens, num_q, head_dim], contiguous
    eps,
    k_inverse,  # what keys of an e4m3 cache are multiplied by, or None
    v_inverse,  # as k_inverse, of values
    stride_block,  # of both caches, in elements, as are stride_token and stride_head
    stride_token,
    stride_head,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a tile; divides NUM_Q and NUM_KV
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    SHARES_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_tokens, (NUM_Q + 2 * NUM_KV) // HEADS). A program takes a tile of heads of a token."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    tile = heads * HEAD_DIM + columns  # [HEADS, HALF]
    NUM_HEADS: tl.constexpr = NUM_Q + (1 if SHARES_KV else 2) * NUM_KV
    source = first
    if SHARES_KV:
        source = tl.where(first < NUM_HEADS, first, first - NUM_KV)  # values are keys
    source_ptr = qkv_ptr + (token * NUM_HEADS + source) * HEAD_DIM + tile
    slot = tl.load(slot_mapping_ptr + token)  # written by the step's first kernel, which no layer follows directly
    wait_for_predecessor(PDL)
    low = tl.load(source_ptr)  # first half of every head
    high = tl.load(source_ptr + HALF)
    if HAS_BIAS:
        low = low.to(tl.float32) + tl.load(bias_ptr + source * HEAD_DIM + tile).to(tl.float32)
        high = high.to(tl.float32) + tl.load(bias_ptr + source * HEAD_DIM + tile + HALF).to(tl.float32)
    kept = slot >= 0
    in_cache = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token + heads * stride_head + columns

    if first >= NUM_Q + NUM_KV:
        v_low = low
        v_high = high
        if NORMS_VALUES:
            v_low = low.to(tl.float32)
            v_high = high.to(tl.float32)
            v_scale = tl.rsqrt((tl.sum(v_low * v_low, axis=1) + tl.sum(v_high * v_high, axis=1)) / HEAD_DIM + eps)
            v_low = v_low * v_scale[:, None]
            v_high = v_high * v_scale[:, None]
        if v_inverse is not None:
            v_low = v_low.to(tl.float32) * v_inverse
            v_high = v_high.to(tl.float32) * v_inverse
        v_ptr = v_cache_ptr + (first - NUM_Q - NUM_KV) * stride_head + in_cache
        tl.store(v_ptr, narrowed(v_low, v_cache_ptr.dtype.element_ty), mask=kept)
        tl.store(v_ptr + HALF, narrowed(v_high, v_cache_ptr.dtype.element_ty), mask=kept)
    else:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if HAS_NORM:
            norm_ptr = k_norm_ptr
            if first < NUM_Q:
                norm_ptr = q_norm_ptr
            scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
            a = a * scale * tl.load(norm_ptr + columns).to(tl.float32)
            b = b * scale * tl.load(norm_ptr + HALF + columns).to(tl.float32)
        position = tl.where(kept, tl.load(positions_ptr + token), 0).to(tl.int64)  # positions of padding may be invalid
        cos = tl.load(rope_ptr + position * HEAD_DIM + columns)
        sin = tl.load(rope_ptr + position * HEAD_DIM + HALF + columns)
        rotated_a = a * cos - b * sin
        rotated_b = b * cos + a * sin
        if first < NUM_Q:
            if factors_ptr is not None:
                factor = tl.load(factors_ptr + position)
                rotated_a = rotated_a * factor
                rotated_b = rotated_b * factor
            q_ptr = q_out_ptr + (token * NUM_Q + first) * HEAD_DIM + tile
            tl.store(q_ptr, rotated_a.to(q_out_ptr.dtype.element_ty))
            tl.store(q_ptr + HALF, rotated_b.to(q_out_ptr.dtype.element_ty))
        else:
            if k_inverse is not None:
                rotated_a = rotated_a * k_inverse
                rotated_b = rotated_b * k_inverse
            k_ptr = k_cache_ptr + (first - NUM_Q) * stride_head + in_cache
            tl.store(k_ptr, narrowed(rotated_a, k_cache_ptr.dtype.element_ty), mask=kept)
            tl.store(k_ptr + HALF, narrowed(rotated_b, k_cache_ptr.dtype.element_ty), mask=kept)


def qk_norm_rope_kv(
    qkv: Tensor,  # [num_tokens, num_heads * head_dim], contiguous
    weights: AttentionWeights,
    positions: Tensor,  # [num_tokens] int32
    slot_mapping: Tensor,  # [num_tokens] int64; -1 writes nothing
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_cache: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """Write K and V of each token to its slot; return q, normed and rotated: `[num_tokens, num_q_heads, head_dim]`."""
    _check(qkv, weights, positions, slot_mapping, k_cache, v_cache)
    num_tokens, num_q, num_kv, head_dim = qkv.shape[0], weights.num_q_heads, weights.num_kv_heads, weights.head_dim
    q = torch.empty((num_tokens, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    heads = min(heads_per_program(num_tokens, num_q, num_kv), MAX_ELEMENTS // head_dim)
    _qk_norm_rope_kv_kernel[(num_tokens, (num_q + 2 * num_kv) // heads)](
        qkv_ptr=qkv,
        q_norm_ptr=qkv if weights.q_norm is None else weights.q_norm,
        k_norm_ptr=qkv if weights.k_norm is None else weights.k_norm,
        bias_ptr=qkv if weights.bias is None else weights.bias,
        rope_ptr=weights.rope,
        factors_ptr=weights.query_factors,
        positions_ptr=positions,
        slot_mapping_ptr=slot_mapping,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        q_out_ptr=q,
        eps=weights.norm_eps,
        k_inverse=1.0 / weights.k_scale if is_e4m3(k_cache) else None,
        v_inverse=1.0 / weights.v_scale if is_e4m3(v_cache) else None,
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        NUM_Q=num_q,
        NUM_KV=num_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        HEADS=heads,
        HAS_NORM=weights.q_norm is not None,
        HAS_BIAS=weights.bias is not None,
        NORMS_VALUES=weights.norms_values,
        SHARES_KV=weights.shares_kv,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1 if heads == 1 else 4,
    )
    return q


def heads_per_program(num_tokens: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return the largest power of two, up to MAX_HEADS, that divides both counts; 1 for few tokens."""
    if num_tokens <= LOW_LATENCY_TOKENS:
        return 1
    common = math.gcd(num_q_heads, num_kv_heads)
    return min(common & -common, MAX_HEADS)


def _check(
    qkv: Tensor,
    weights: AttentionWeights,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    num_tokens = qkv.shape[0]
    check_qkv(qkv, weights)
    check_column("positions", positions, num_tokens)
    check_column("slot_mapping", slot_mapping, num_tokens, torch.int64)
    check_caches(k_cache, v_cache, weights.head_dim)
    assert k_cache.shape[2] == weights.num_kv_heads, (
        f"cache {tuple(k_cache.shape)}: {weights.num_kv_heads} heads needed"
    )
