"""Ragged paged causal attention against the reference."""

import pytest
import torch
from torch import Tensor

from common.kernels.prefill_attention import prefill_attention
from common.ops import reference
from common.ops.base import ForwardBatch
from tests.kernels.conftest import AssertClose, MakePaged, gpu_at


def attend(q: Tensor, pool: Tensor, batch: ForwardBatch, scale: float) -> Tensor:
    return prefill_attention(
        q=q,
        k_cache=pool[:, 1, 0],
        v_cache=pool[:, 1, 1],
        block_tables=batch.block_tables[0],
        cu_seqlens=batch.cu_seqlens,
        seq_lens=batch.seq_lens,
        max_query_len=batch.max_query_len,
        scale=scale,
        gpu=gpu_at(q.device),
    )


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "block_size", "num_q", "num_kv", "head_dim"),
    [
        ([1], [1], 16, 2, 1, 64),
        ([33], [33], 16, 4, 2, 64),  # one prompt, a query and a key past a tile
        ([5, 40, 1, 32], [5, 70, 65, 32], 16, 2, 2, 64),  # whole prompts, chunks with a prior context, one token
        ([3, 64, 31], [130, 64, 95], 32, 3, 1, 32),
        ([129], [200], 64, 2, 1, 64),  # more queries than any tile
        ([17, 2], [50, 2], 16, 4, 1, 128),
    ],
)
def test_equals_reference(
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    num_q: int,
    num_kv: int,
    head_dim: int,
    make_paged: MakePaged,
    assert_close: AssertClose,
) -> None:
    pool, batch = make_paged(query_lens, seq_lens, block_size, num_kv, head_dim)
    q = torch.randn(sum(query_lens), num_q, head_dim).to(pool)
    out = attend(q, pool, batch, head_dim**-0.5)
    assert_close(out, reference.paged_attention(q, pool[:, 1, 0], pool[:, 1, 1], batch, head_dim**-0.5))


def test_large_scores_do_not_overflow(make_paged: MakePaged, assert_close: AssertClose) -> None:
    pool, batch = make_paged([20], [75], 16, 1, 64)
    q = (torch.randn(20, 2, 64) * 30).to(pool)
    out = attend(q, pool, batch, 1.0)
    assert torch.isfinite(out).all()
    assert_close(out, reference.paged_attention(q, pool[:, 1, 0], pool[:, 1, 1], batch, 1.0))


def test_padding_between_sequences(make_paged: MakePaged, assert_close: AssertClose) -> None:
    pool, batch = make_paged([7, 1, 9], [7, 0, 12], 16, 1, 64)
    q = torch.randn(17, 2, 64).to(pool)
    out = attend(q, pool, batch, 0.125)
    assert_close(out, reference.paged_attention(q, pool[:, 1, 0], pool[:, 1, 1], batch, 0.125))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_full_tiles_equal_reference(
    head_dim: int, block_size: int, cuda: torch.device, make_paged: MakePaged, assert_close: AssertClose
) -> None:
    pool, batch = make_paged([700, 129, 1, 300], [700, 1001, 513, 300], block_size, 2, head_dim)
    q = torch.randn(1130, 8, head_dim).to(pool)
    out = attend(q, pool, batch, head_dim**-0.5)
    assert_close(out, reference.paged_attention(q, pool[:, 1, 0], pool[:, 1, 1], batch, head_dim**-0.5))
