"""Attention of one token a sequence against the reference, whole and cut, and the same to the bit in any company."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.kernels.attention.decode_attention import decode_attention
from common.kernels.attention.decode_division import divide, limits_for
from common.kernels.attention.decode_parts import make_workspace
from common.ops.base import ForwardBatch
from tests.kernels.conftest import AssertClose, MakePaged, expected_attention, random_sinks
from tests.support.attention_shapes import SEEING, Seeing


def attend(
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    num_slots: int,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    v_scale: float = 1.0,
) -> Tensor:
    """Over layer 1 of the pool, with contexts divided for `num_slots` programs."""
    num_kv, head_dim = pool.shape[4:]
    limits = limits_for(len(q), num_kv, num_slots)
    return decode_attention(
        q=q,
        k_cache=pool[:, 1, 0],
        v_cache=pool[:, 1, 1],
        block_tables=batch.block_tables[0],
        seq_lens=batch.seq_lens,
        scale=scale or head_dim**-0.5,
        division=divide(batch.seq_lens, num_kv, num_slots, num_layers=2, window=window),
        workspace=make_workspace(limits.max_joins + 1, q.shape[1], num_kv, head_dim, q.device),
        layer_id=1,
        window=window,
        sinks=sinks,
        v_scale=v_scale,
    )


@pytest.mark.parametrize("num_slots", [1, 4, 396])  # the more programs, the more contexts are cut
@pytest.mark.parametrize(
    ("seq_lens", "block_size", "num_q", "num_kv", "head_dim"),
    [
        ([1], 16, 4, 1, 64),
        ([64, 0, 65, 1], 16, 4, 2, 64),  # a row of padding among others
        ([700], 32, 2, 1, 64),
        ([130, 300], 64, 3, 3, 32),  # no grouping
        ([257, 16], 16, 20, 1, 128),  # more heads in a group than a small tile has rows
        ([0, 0, 0], 16, 2, 1, 32),
        ([300, 0, 17], 16, 2, 1, 512),  # fewer keys at once than a tile has
    ],
)
def test_equals_reference(
    seq_lens: list[int],
    block_size: int,
    num_q: int,
    num_kv: int,
    head_dim: int,
    num_slots: int,
    make_paged: MakePaged,
    assert_close: AssertClose,
) -> None:
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, block_size, num_kv, head_dim)
    q = torch.randn(len(seq_lens), num_q, head_dim).to(pool)
    out = attend(q, pool, batch, num_slots)
    assert_close(out, expected_attention(q, pool, batch))
    assert (out[batch.seq_lens == 0] == 0).all()


@pytest.mark.parametrize("num_slots", [1, 396])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 63, 64, 130, 600])
def test_windows_and_sinks(
    window: int, has_sinks: bool, num_slots: int, make_paged: MakePaged, assert_close: AssertClose
) -> None:
    check_window([700, 0, 1, 64, 129, 2000], 32, window, has_sinks, num_slots, make_paged, assert_close)


def test_windows_of_huge_heads(make_paged: MakePaged, assert_close: AssertClose) -> None:
    """Fewer keys are multiplied at once than a tile has, so a window or a context may begin or end behind some."""
    check_window([700, 0, 1, 200], 512, 130, True, 396, make_paged, assert_close)


def check_window(
    seq_lens: list[int],
    head_dim: int,
    window: int,
    has_sinks: bool,
    num_slots: int,
    make_paged: MakePaged,
    assert_close: AssertClose,
) -> None:
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, 16, 2, head_dim, window)
    q = torch.randn(len(seq_lens), 6, head_dim).to(pool)
    sinks = random_sinks(6, q.device) if has_sinks else None
    out = attend(q, pool, batch, num_slots, window=window, sinks=sinks)
    assert_close(out, expected_attention(q, pool, batch, window=window, sinks=sinks))
    assert (out[batch.seq_lens == 0] == 0).all()


@pytest.mark.medium
@pytest.mark.parametrize("window", [0, 1000])
def test_a_sequence_has_the_same_bits_in_any_company(window: int, make_paged: MakePaged) -> None:
    """Alone and cut to the last part, or whole among many."""
    seq_lens = [700, 64, 3000, 65, 1, 0, 2049, 128]
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, 16, 2, 64, window)
    q = torch.randn(len(seq_lens), 4, 64).to(pool)
    sinks = random_sinks(4, q.device) if window else None
    together = attend(q, pool, batch, 1, None, window, sinks)
    for row in range(len(seq_lens)):
        tables, lens = batch.block_tables[0][row : row + 1], batch.seq_lens[row : row + 1]
        alone = replace(batch, block_tables=(tables,), seq_lens=lens)
        assert torch.equal(attend(q[row : row + 1], pool, alone, 396, None, window, sinks), together[row : row + 1])
    assert torch.equal(attend(q, pool, batch, 4, None, window, sinks), together)
    assert torch.equal(attend(q, pool, batch, 396, None, window, sinks), together)


def test_large_scores_do_not_overflow(make_paged: MakePaged, assert_close: AssertClose) -> None:
    pool, batch = make_paged([1], [400], 16, 1, 64)
    q = (torch.randn(1, 4, 64) * 30).to(pool)
    assert_close(attend(q, pool, batch, 396, scale=1.0), expected_attention(q, pool, batch, scale=1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 3, 64, 256])
def test_full_size_equals_reference(num_seqs: int, make_paged: MakePaged, assert_close: AssertClose) -> None:
    seq_lens = [int(n) for n in torch.randint(0, 500, (num_seqs,))]
    seq_lens[0] = 9001
    pool, batch = make_paged([1] * num_seqs, seq_lens, 16, 8, 128)
    q = torch.randn(num_seqs, 32, 128).to(pool)
    assert_close(attend(q, pool, batch, 396), expected_attention(q, pool, batch))


@pytest.mark.gpu
@pytest.mark.parametrize("seeing", SEEING, ids=str)
def test_models_that_see_less_or_more(seeing: Seeing, make_paged: MakePaged, assert_close: AssertClose) -> None:
    num_q, num_kv, head_dim, window, has_sinks = seeing
    seq_lens = [9001, *torch.randint(0, 5000, (19,)).tolist()]
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, 16, num_kv, head_dim, window)
    q = torch.randn(len(seq_lens), num_q, head_dim).to(pool)
    sinks = random_sinks(num_q, q.device) if has_sinks else None
    expected = expected_attention(q, pool, batch, window=window, sinks=sinks)
    for num_slots in (1, 396):
        assert_close(attend(q, pool, batch, num_slots, window=window, sinks=sinks), expected)
