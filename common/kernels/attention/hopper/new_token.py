"""Inputs from the newest token of a sequence to decode attention: queries, normed and rotated, key and value. Gluon."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from common.kernels.attention.decode_parts import NO_KEYS
from common.kernels.attention.hopper.register_tiles import dims_of_rows, queries_in_order
from common.kernels.base.e4m3 import as_factor, in_fp32, narrowed
from common.kernels.base.pdl import wait_for_predecessor


@gluon.jit
def _rotated(
    head_ptr, bias_ptr, mask, norm_low, norm_high, cos, sin, eps,
    HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, HEAD_DIM: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Return both halves of heads, normed and rotated, `[heads, HEAD_DIM // 2]` each, shaped like all arguments."""
    a = gl.load(head_ptr, mask=mask, other=0.0).to(gl.float32)
    b = gl.load(head_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(gl.float32)
    if HAS_BIAS:
        a += gl.load(bias_ptr, mask=mask, other=0.0).to(gl.float32)
        b += gl.load(bias_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(gl.float32)
    if HAS_NORM:
        scale = gl.rsqrt((gl.sum(a * a, axis=1) + gl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        a = a * scale * norm_low.to(gl.float32)
        b = b * scale * norm_high.to(gl.float32)
    return (a * cos - b * sin).to(DTYPE), (b * cos + a * sin).to(DTYPE)


@gluon.jit
def begin_token(
    shared,  # as in the kernel, like token and pool
    token,
    pool,
    seq,
    past,  # the new token's position
    kv_head,
    is_first,  # tells whether the item is the program's first
    writes,  # tells whether to write the new key and value
    mma: gl.constexpr,
    NUM_KV: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NORMS_VALUES: gl.constexpr,
    SHARES_KV: gl.constexpr,
    PDL: gl.constexpr,
):
    """Leave the group's queries in shared memory; write the new key and value if `writes`.

    Returns scores of the new key, unscaled, `[ROWS]`, and the new value `[HEAD_DIM]`, laid out as slices of `mma`. Both
    are of the numbers as the cache holds them.
    """
    _, _, q_smem, _, _, _, _, _, _ = shared
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, rope_ptr, factors_ptr, eps, k_inverse, v_inverse = token
    _, pool_ptr, block_tables_ptr, table_stride, block_rows, layer_row = pool
    ROWS: gl.constexpr = q_smem.shape[0]
    HEAD_DIM: gl.constexpr = q_smem.shape[1]
    HALF: gl.constexpr = HEAD_DIM // 2
    WIDTH: gl.constexpr = NUM_KV * HEAD_DIM
    DTYPE: gl.constexpr = qkv_ptr.dtype.element_ty
    CACHE: gl.constexpr = pool_ptr.dtype.element_ty
    V_HEAD: gl.constexpr = NUM_KV * (GROUP + (0 if SHARES_KV else 1))
    halves: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [4, 1], [1, 0])
    columns = gl.arange(0, HALF, gl.SliceLayout(0, halves))[None, :]
    angle_ptr = rope_ptr + past.to(gl.int64) * HEAD_DIM + columns
    cos = gl.load(angle_ptr)
    sin = gl.load(angle_ptr + HALF)
    q_cos = cos
    q_sin = sin
    if factors_ptr is not None:
        factor = gl.load(factors_ptr + past)
        q_cos = cos * factor
        q_sin = sin * factor
    q_norm_low = gl.load(q_norm_ptr + columns)
    q_norm_high = gl.load(q_norm_ptr + HALF + columns)
    k_norm_low = gl.load(k_norm_ptr + columns)
    k_norm_high = gl.load(k_norm_ptr + HALF + columns)
    new_block = gl.load(block_tables_ptr + seq.to(gl.int64) * table_stride + past // BLOCK_SIZE)
    if is_first:
        wait_for_predecessor(PDL)

    rows = gl.arange(0, ROWS, gl.SliceLayout(1, halves))[:, None]
    token_ptr = qkv_ptr + seq.to(gl.int64) * ((V_HEAD + NUM_KV) * HEAD_DIM)
    q = (kv_head * GROUP + rows) * HEAD_DIM + columns
    k = (NUM_KV * GROUP + kv_head) * HEAD_DIM + columns
    dims = dims_of_rows(HEAD_DIM, gl.SliceLayout(1, mma), CACHE)
    v = (V_HEAD + kv_head) * HEAD_DIM + dims
    new_v = gl.load(token_ptr + v)
    if HAS_BIAS or NORMS_VALUES or v_inverse is not None:
        value = new_v.to(gl.float32)
        if HAS_BIAS:
            value += gl.load(bias_ptr + v).to(gl.float32)
        if NORMS_VALUES:
            value *= gl.rsqrt(gl.sum(value * value, axis=0) / HEAD_DIM + eps)
        if v_inverse is not None:
            value = value * v_inverse
        new_v = narrowed(value, CACHE)
    q_low, q_high = _rotated(
        token_ptr + q, bias_ptr + q, rows < GROUP, q_norm_low, q_norm_high, q_cos, q_sin, eps,
        HAS_NORM, HAS_BIAS, HEAD_DIM, DTYPE,
    )  # fmt: skip
    q_low = as_factor(q_low, CACHE)
    q_high = as_factor(q_high, CACHE)
    k_low, k_high = _rotated(
        token_ptr + k, bias_ptr + k, columns < HALF, k_norm_low, k_norm_high, cos, sin, eps,
        HAS_NORM, HAS_BIAS, HEAD_DIM, DTYPE if k_inverse is None else gl.float32,
    )  # fmt: skip
    if k_inverse is not None:
        k_low = narrowed(k_low * k_inverse, CACHE)
        k_high = narrowed(k_high * k_inverse, CACHE)
    if CACHE.is_fp8():
        q_smem.store(queries_in_order(q_low, q_high))
    else:
        q_smem.slice(0, HALF, dim=1).store(q_low)
        q_smem.slice(HALF, HALF, dim=1).store(q_high)
    fence_async_shared()
    tl.debug_barrier()
    if writes:
        slot_row = new_block.to(gl.int64) * block_rows + layer_row + past % BLOCK_SIZE
        slot_ptr = pool_ptr + slot_row * WIDTH + kv_head * HEAD_DIM
        gl.store(slot_ptr + columns, k_low)
        gl.store(slot_ptr + HALF + columns, k_high)
        gl.store(slot_ptr + BLOCK_SIZE * WIDTH + dims, new_v)
    products = q_low.to(gl.float32) * in_fp32(k_low) + q_high.to(gl.float32) * in_fp32(k_high)
    return gl.convert_layout(gl.sum(products, axis=1), gl.SliceLayout(0, mma)), in_fp32(new_v)


@gluon.jit
def begin_part(is_last, new_value, new_scores, sums):
    """Begin a part without keys; the last part of a context begins with the new key."""
    tile_keys = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    acc = gl.where(is_last, new_value, gl.zeros_like(new_value))
    row_max = gl.where(is_last, new_scores, gl.full_like(new_scores, NO_KEYS))
    sums = gl.where(is_last & (tile_keys == 0)[:, None], gl.full_like(sums, 1.0), gl.zeros_like(sums))
    return acc, row_max, sums
