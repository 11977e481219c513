"""Checks of tensors by launchers, because a kernel reads memory as told and would not notice a wrong layout."""

import torch
from torch import Tensor

from common.kernels.base.attention_operands import E4M3_TYPES, HEAD_DIMS, AttentionWeights, PromptOperands
from common.kernels.base.codes import LARGEST
from common.kernels.base.gate import ACTIVATIONS


def check_column(what: str, column: Tensor, length: int, dtype: torch.dtype = torch.int32) -> None:
    """Require a number for each of `length` rows; `what` names the column in errors."""
    assert column.shape == (length,) and column.is_contiguous(), f"{_laid_out(what, column)}: [{length}] needed"
    assert column.dtype == dtype, f"{what} of {column.dtype}: {dtype} needed"


def check_block_tables(block_tables: Tensor, num_rows: int) -> None:
    """Require `[num_rows, max_blocks]` int32; rows may be strided."""
    assert block_tables.shape[0] == num_rows and block_tables.stride(1) == 1, (
        f"{_laid_out('block_tables', block_tables)}: [{num_rows}, max_blocks], contiguous columns needed"
    )
    assert block_tables.dtype == torch.int32, f"block_tables of {block_tables.dtype}: int32 needed"


def check_caches(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> None:
    """Require caches `[num_blocks, block_size, num_kv_heads, head_dim]`, strided alike, each head contiguous."""
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(), (
        f"{_laid_out('k_cache', k_cache)}, {_laid_out('v_cache', v_cache)}: laid out alike needed"
    )
    assert k_cache.dtype == v_cache.dtype, f"k_cache {k_cache.dtype}, v_cache {v_cache.dtype}: one dtype needed"
    assert k_cache.shape[3] == head_dim and k_cache.stride(3) == 1, (
        f"{_laid_out('cache', k_cache)}: contiguous heads of {head_dim} needed"
    )


def check_queries(q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None = None) -> None:
    """Require contiguous `q [num_tokens, num_q_heads, head_dim]`, a supported head_dim, heads that fit the caches.

    `sinks` are `[num_q_heads]` fp32.
    """
    assert q.ndim == 3 and q.is_contiguous(), f"{_laid_out('q', q)}: contiguous, 3-D needed"
    assert q.shape[2] in HEAD_DIMS, f"head_dim {q.shape[2]}: one of {HEAD_DIMS} needed"
    check_caches(k_cache, v_cache, q.shape[2])
    fits = k_cache.dtype == q.dtype or k_cache.dtype in E4M3_TYPES
    assert fits, f"cache {k_cache.dtype}, q {q.dtype}: one dtype, or e4m3 needed"
    assert q.shape[1] % k_cache.shape[2] == 0, f"{q.shape[1]} query heads: a multiple of {k_cache.shape[2]} needed"
    if sinks is not None:
        check_column("sinks", sinks, q.shape[1], torch.float32)


def check_prompts(prompts: PromptOperands) -> None:
    """Require operands as prompt attention takes them."""
    num_seqs = prompts.seq_lens.shape[0]
    check_queries(prompts.q, prompts.k_cache, prompts.v_cache, prompts.sinks)
    check_block_tables(prompts.block_tables, num_seqs)
    check_column("cu_seqlens", prompts.cu_seqlens, num_seqs + 1)
    check_column("seq_lens", prompts.seq_lens, num_seqs)


def check_qkv(qkv: Tensor, weights: AttentionWeights) -> None:
    """Require contiguous `qkv [num_tokens, num_heads * head_dim]`, and weights that fit."""
    head_dim = weights.head_dim
    width = weights.num_heads * head_dim
    assert qkv.ndim == 2 and qkv.shape[1] == width and qkv.is_contiguous(), (
        f"{_laid_out('qkv', qkv)}: contiguous, {width} columns needed"
    )
    assert head_dim in HEAD_DIMS, f"head_dim {head_dim}: one of {HEAD_DIMS} needed"
    assert (weights.q_norm is None) == (weights.k_norm is None), "q_norm and k_norm come together"
    for norm in (weights.q_norm, weights.k_norm):
        assert norm is None or (norm.shape == (head_dim,) and norm.is_contiguous()), (
            f"{_laid_out('norm weight', norm)}: [{head_dim}] needed"
        )
    bias = weights.bias
    assert bias is None or (bias.shape == (width,) and bias.is_contiguous()), (
        f"{_laid_out('bias', bias)}: [{width}] needed"
    )
    rope = weights.rope
    assert rope.dtype == torch.float32 and rope.shape[1] == head_dim and rope.is_contiguous(), (
        f"{_laid_out('rope', rope)} {rope.dtype}: contiguous fp32, {head_dim} columns needed"
    )
    if weights.sinks is not None:
        check_column("sinks", weights.sinks, weights.num_q_heads, torch.float32)
    if weights.query_factors is not None:
        check_column("query_factors", weights.query_factors, rope.shape[0], torch.float32)


def check_product(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None, *, splits: int, gated: bool) -> None:
    """Require `out [m, n]`, or parts `[splits, m, n]`, for `x [m, k] @ weight.T`; a gated `weight` has 2 * n rows."""
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    assert weight.shape[1] == k and x.is_contiguous() and weight.is_contiguous(), (
        f"{_laid_out('x', x)}, {_laid_out('weight', weight)}: contiguous, alike in k needed"
    )
    shape = (splits, m, n) if splits > 1 else (m, n)
    assert out.shape == shape and out.is_contiguous(), f"{_laid_out('out', out)}: contiguous {shape} needed"
    assert residual is None or residual.shape == (m, n), f"residual {tuple(residual.shape)}: ({m}, {n}) needed"
    assert splits == 1 or (residual is None and not gated), f"{splits} splits: parts are sums of the product alone"


def check_codes(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None, *, splits: int, gated: bool) -> None:
    """Require what `check_product` does, of codes of 8 bits: e4m3 or signed bytes, alike."""
    assert x.dtype == weight.dtype and x.dtype in LARGEST, f"x {x.dtype}, weight {weight.dtype}: codes, alike"
    check_product(x, weight, out, residual, splits=splits, gated=gated)


def check_ending(n: int, bias: Tensor | None, activation: str | None) -> None:
    """Require a known activation, or none, and a bias `[n]` only without an activation."""
    assert activation is None or activation in ACTIVATIONS, f"activation {activation}: one of {ACTIVATIONS} needed"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous() and activation is None), (
        f"{_laid_out('bias', bias)}, activation {activation}: [{n}] and no activation needed"
    )


def _laid_out(what: str, tensor: Tensor) -> str:
    return f"{what} {tuple(tensor.shape)} with strides {tensor.stride()}"
