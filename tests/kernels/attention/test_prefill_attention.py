"""Ragged paged causal attention against the reference."""

import pytest
import torch
from torch import Tensor

from common.kernels.attention.prefill_attention import prefill_attention
from common.ops.base import ForwardBatch
from tests.kernels.conftest import (
    AssertClose,
    AttentionCase,
    MakeAttention,
    expected_attention,
    gpu_at,
    prompts_of,
    random_sinks,
)
from tests.support.attention_shapes import SEEING, Seeing


def attend(
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    v_scale: float = 1.0,
) -> Tensor:
    prompts = prompts_of(q, pool, batch, scale, window=window, sinks=sinks, v_scale=v_scale)
    return prefill_attention(prompts, batch.max_query_len, gpu_at(q.device))


@pytest.mark.parametrize(
    "case",
    [
        ([1], [1], 16, 2, 1, 64),
        ([33], [33], 16, 4, 2, 64),  # one prompt, a query and a key past a tile
        ([5, 40, 1, 32], [5, 70, 65, 32], 16, 2, 2, 64),  # whole prompts, chunks with a prior context, one token
        ([3, 64, 31], [130, 64, 95], 32, 3, 1, 32),
        ([129], [200], 64, 2, 1, 64),  # more queries than any tile
        ([17, 2], [50, 2], 16, 4, 1, 128),
        ([33, 1], [50, 0], 16, 2, 1, 512),
    ],
    ids=str,
)
def test_equals_reference(case: AttentionCase, make_attention: MakeAttention, assert_close: AssertClose) -> None:
    q, pool, batch = make_attention(*case)
    assert_close(attend(q, pool, batch), expected_attention(q, pool, batch))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 20, 32, 70, 500])
@pytest.mark.parametrize(
    "case",
    [
        ([5, 40, 1, 3, 32], [5, 170, 65, 0, 32], 16, 4, 2, 64),
        ([129], [300], 32, 3, 1, 32),
        ([70], [135], 64, 2, 1, 256),
    ],
    ids=str,
)
def test_windows_and_sinks(
    case: AttentionCase, window: int, has_sinks: bool, make_attention: MakeAttention, assert_close: AssertClose
) -> None:
    q, pool, batch = make_attention(*case, window)
    sinks = random_sinks(q.shape[1], q.device) if has_sinks else None
    out = attend(q, pool, batch, None, window, sinks)
    assert_close(out, expected_attention(q, pool, batch, None, window, sinks))


def test_large_scores_do_not_overflow(make_attention: MakeAttention, assert_close: AssertClose) -> None:
    q, pool, batch = make_attention([20], [75], 16, 2, 1, 64)
    q *= 30
    assert_close(attend(q, pool, batch, 1.0), expected_attention(q, pool, batch, 1.0))


def test_padding_between_sequences(make_attention: MakeAttention, assert_close: AssertClose) -> None:
    q, pool, batch = make_attention([7, 1, 9], [7, 0, 12], 16, 2, 1, 64)
    assert_close(attend(q, pool, batch), expected_attention(q, pool, batch))


@pytest.mark.gpu
@pytest.mark.parametrize("seeing", SEEING, ids=str)
def test_models_that_see_less_or_more(seeing: Seeing, make_attention: MakeAttention, assert_close: AssertClose) -> None:
    num_q, num_kv, head_dim, window, has_sinks = seeing
    q, pool, batch = make_attention([700, 129, 1, 300], [5000, 1001, 513, 300], 16, num_q, num_kv, head_dim, window)
    sinks = random_sinks(num_q, q.device) if has_sinks else None
    out = attend(q, pool, batch, None, window, sinks)
    assert_close(out, expected_attention(q, pool, batch, None, window, sinks))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_full_tiles_equal_reference(
    head_dim: int, block_size: int, cuda: torch.device, make_attention: MakeAttention, assert_close: AssertClose
) -> None:
    q, pool, batch = make_attention([700, 129, 1, 300], [700, 1001, 513, 300], block_size, 8, 2, head_dim)
    assert_close(attend(q, pool, batch), expected_attention(q, pool, batch))
