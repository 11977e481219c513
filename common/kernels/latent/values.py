"""Product of each head's weighted sum of latents with the head's rows of values: the end of absorbed attention.

Reads `num_heads * value_dim * rank` weights, 2 MB for DeepSeek-V2-Lite: bound by them up to about 200 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.latent_operands import LatentWeights
from common.kernels.base.pdl import wait_for_predecessor

TOKENS = 16  # of a program: rows of a matrix product on tensor cores
VALUE_TILE = 32  # columns of a program
RANK_TILE = 64  # elements of a latent multiplied at once


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_values_kernel(
    x_ptr,  # [num_tokens, NUM_HEADS, RANK], contiguous
    values_ptr,  # [NUM_HEADS, VALUE, RANK], heads head_stride apart
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE], contiguous
    num_tokens,
    head_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_TILE: tl.constexpr,  # divides VALUE
    RANK_TILE: tl.constexpr,  # divides RANK
    PDL: tl.constexpr,
):
    """Grid: (token tiles, NUM_HEADS, VALUE / VALUE_TILE)."""
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    kept = (tokens < num_tokens)[:, None]
    ranks = tl.arange(0, RANK_TILE)[None, :]
    x_ptrs = x_ptr + ((tokens * NUM_HEADS + head) * RANK)[:, None] + ranks
    values_ptrs = values_ptr + head * head_stride + columns[:, None] * RANK + ranks
    wait_for_predecessor(PDL)
    acc = tl.zeros((TOKENS, VALUE_TILE), tl.float32)
    for begin in range(0, RANK, RANK_TILE):
        x = tl.load(x_ptrs + begin, mask=kept, other=0.0)
        values = tl.load(values_ptrs + begin)
        acc = tl.dot(x, tl.trans(values), acc, input_precision="ieee")
    out_ptrs = out_ptr + ((tokens * NUM_HEADS + head) * VALUE)[:, None] + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=kept)


def latent_values(x: Tensor, weights: LatentWeights, *, pdl: bool = False) -> Tensor:
    """Return values of sums of latents `x [num_tokens, num_heads, rank]`: `[num_tokens, num_heads, value_dim]`."""
    num_tokens, num_heads, rank, value_dim = x.shape[0], weights.num_heads, weights.rank, weights.value_dim
    assert x.shape[1:] == (num_heads, rank) and x.is_contiguous(), f"x {tuple(x.shape)}: sums of latents needed"
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    value_tile = min(VALUE_TILE, value_dim)
    _latent_values_kernel[(triton.cdiv(num_tokens, TOKENS), num_heads, value_dim // value_tile)](
        x_ptr=x,
        values_ptr=weights.values,
        out_ptr=out,
        num_tokens=num_tokens,
        head_stride=weights.expand.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        VALUE=value_dim,
        TOKENS=TOKENS,
        VALUE_TILE=value_tile,
        RANK_TILE=min(RANK_TILE, rank),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
        num_stages=3,
    )
    return out
