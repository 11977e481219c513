"""Split-KV attention against the reference, with few and many splits, and rows of padding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.kernels.decode_attention import decode_attention
from common.kernels.decode_splits import make_workspace
from common.ops import reference
from common.ops.base import ForwardBatch

AssertClose = Callable[[Tensor, Tensor], None]
MakePaged = Callable[[list[int], list[int], int, int, int], tuple[Tensor, ForwardBatch]]


@pytest.mark.parametrize("num_sms", [1, 4, 132])  # more multiprocessors, more splits
@pytest.mark.parametrize(
    ("seq_lens", "block_size", "num_q", "num_kv", "head_dim"),
    [
        ([1], 16, 4, 1, 64),
        ([64, 0, 65, 1], 16, 4, 2, 64),  # a row of padding among others
        ([700], 32, 2, 1, 64),
        ([130, 300], 64, 3, 3, 32),  # no grouping
        ([257, 16], 16, 20, 1, 128),  # more heads in a group than a small tile has rows
        ([0, 0, 0], 16, 2, 1, 32),
    ],
)
def test_equals_reference(
    seq_lens: list[int],
    block_size: int,
    num_q: int,
    num_kv: int,
    head_dim: int,
    num_sms: int,
    device: torch.device,
    make_paged: MakePaged,
    assert_close: AssertClose,
) -> None:
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, block_size, num_kv, head_dim)
    q = torch.randn(len(seq_lens), num_q, head_dim).to(pool)
    workspace = make_workspace(len(seq_lens) + 2, num_q, num_kv, head_dim, num_sms, device)
    k, v = pool[:, 1, 0], pool[:, 1, 1]
    out = decode_attention(q, k, v, batch.block_tables, batch.seq_lens, head_dim**-0.5, workspace)
    assert_close(out, reference.paged_attention(q, k, v, batch, head_dim**-0.5))
    assert (out[batch.seq_lens == 0] == 0).all()


def test_large_scores_do_not_overflow(device: torch.device, make_paged: MakePaged, assert_close: AssertClose) -> None:
    pool, batch = make_paged([1], [400], 16, 1, 64)
    q = (torch.randn(1, 4, 64) * 30).to(pool)
    workspace = make_workspace(1, 4, 1, 64, 132, device)
    k, v = pool[:, 1, 0], pool[:, 1, 1]
    out = decode_attention(q, k, v, batch.block_tables, batch.seq_lens, 1.0, workspace)
    assert_close(out, reference.paged_attention(q, k, v, batch, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 3, 64, 256])
def test_full_size_equals_reference(
    num_seqs: int, cuda: torch.device, make_paged: MakePaged, assert_close: AssertClose
) -> None:
    seq_lens = [int(n) for n in torch.randint(0, 500, (num_seqs,))]
    seq_lens[0] = 9001
    pool, batch = make_paged([1] * num_seqs, seq_lens, 16, 8, 128)
    q = torch.randn(num_seqs, 32, 128).to(pool)
    workspace = make_workspace(256, 32, 8, 128, 132, cuda)
    k, v = pool[:, 1, 0], pool[:, 1, 1]
    out = decode_attention(q, k, v, batch.block_tables, batch.seq_lens, 128**-0.5, workspace)
    assert_close(out, reference.paged_attention(q, k, v, batch, 128**-0.5))
