"""Attention of few queries against the reference, with contexts whole and cut, and what is left in the workspace."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.kernels.attention.few_query_attention import MAX_PARTS, MIN_PART_KEYS, few_query_attention
from common.kernels.attention.query_parts import QueryParts, make_query_parts, query_parts_bytes, tokens_of_tile
from common.kernels.base.gpu import Gpu
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

PART = MIN_PART_KEYS


def gpu_of_size(num_sms: int, device: torch.device) -> Gpu:
    """The more multiprocessors, the more parts of a context."""
    return replace(gpu_at(device), num_sms=num_sms)


def attend(
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    workspace: QueryParts,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    v_scale: float = 1.0,
) -> Tensor:
    """Over layer 1 of the pool; leaves the workspace as the next layer wants it."""
    prompts = prompts_of(q, pool, batch, scale, window=window, sinks=sinks, v_scale=v_scale)
    out = few_query_attention(prompts, workspace, gpu_at(q.device))
    assert not workspace.arrivals.any()
    return out


def workspace_of(pool: Tensor, num_sms: int) -> QueryParts:
    """Full of NaN, but for the arrivals."""
    num_kv, head_dim = pool.shape[4:]
    return make_query_parts(num_kv, head_dim, gpu_of_size(num_sms, pool.device), pool.device)


def num_stored(workspace: QueryParts) -> int:
    """Parts of all KV heads that were stored."""
    return int((~workspace.sums.isnan()).any(dim=2).sum())


@pytest.mark.parametrize("num_sms", [2, 8])
@pytest.mark.parametrize(
    "case",
    [
        ([1], [1], 16, 2, 1, 64),
        ([16], [2 * PART + 16], 16, 4, 1, 64),
        ([16], [2 * PART], 32, 4, 4, 32),  # exactly two parts; no grouping
        ([16], [2 * PART + 1], 64, 8, 1, 64),  # one key more; 8 heads a group
        ([3, 40, 1, 5], [PART * 2 + 3, PART + 40, 700, 5], 16, 6, 2, 64),  # groups of 3, whole prompts among chunks
        ([60], [3 * PART + 10], 16, 4, 1, 32),  # the last part begins amid the queries
        ([7, 1, 9], [600, 0, 12], 16, 7, 1, 64),  # padding between sequences; a group of 7
        ([1, 1, 1, 1], [0, 700, 1, 65], 16, 4, 1, 128),  # one query each, as of the last layer
        ([100], [100], 16, 4, 2, 64),  # a prompt that begins
        ([3, 20], [600, 90], 16, 4, 1, 512),
        ([3], [600], 16, 20, 1, 64),  # a query or two of all heads fill a tile
    ],
    ids=str,
)
def test_equals_reference(
    case: AttentionCase, num_sms: int, make_attention: MakeAttention, assert_close: AssertClose
) -> None:
    q, pool, batch = make_attention(*case)
    workspace = workspace_of(pool, num_sms)
    out = attend(q, pool, batch, workspace)
    assert_close(out, expected_attention(q, pool, batch))
    again = attend(-q, pool, batch, workspace)  # what the last layer left does not matter
    assert_close(again, expected_attention(-q, pool, batch))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 60, 64, 300, PART * 2])
@pytest.mark.parametrize(
    "case",
    [
        ([3, 40, 1, 2, 5], [PART * 4 + 3, PART + 40, 700, 0, 5], 16, 6, 2, 64),  # padding among others
        ([60], [3 * PART + 10], 32, 4, 1, 32),
    ],
    ids=str,
)
def test_windows_and_sinks(
    case: AttentionCase, window: int, has_sinks: bool, make_attention: MakeAttention, assert_close: AssertClose
) -> None:
    q, pool, batch = make_attention(*case, window)
    sinks = random_sinks(q.shape[1], q.device) if has_sinks else None
    out = attend(q, pool, batch, workspace_of(pool, 8), None, window, sinks)
    assert_close(out, expected_attention(q, pool, batch, None, window, sinks))


def test_what_is_out_of_sight_is_not_cut(make_attention: MakeAttention) -> None:
    """A window is as a context of its length."""
    q, pool, batch = make_attention([1], [20 * PART], 16, 4, 1, 32, 2 * PART)
    workspace = workspace_of(pool, 8)
    attend(q, pool, batch, workspace, None, 2 * PART)
    assert num_stored(workspace) == 2
    attend(q, pool, batch, workspace := workspace_of(pool, 8), None, PART)
    assert num_stored(workspace) == 0


def test_contexts_are_cut_to_fill_the_gpu_and_no_further(make_attention: MakeAttention) -> None:
    """Which of all sequences follows from how long they are beside one another."""

    def stored(query_lens: list[int], seq_lens: list[int], num_sms: int) -> int:
        q, pool, batch = make_attention(query_lens, seq_lens, 16, 4, 1, 32)
        workspace = workspace_of(pool, num_sms)
        attend(q, pool, batch, workspace)
        return num_stored(workspace)

    assert stored([1], [2 * PART - 1], 8) == 0, "too short"
    assert stored([1], [2 * PART], 8) == 2
    assert stored([1], [4 * PART], 1) == 2, "as many as run at once"
    assert stored([1], [20 * PART], 8) == MAX_PARTS
    assert stored([1, 1], [4 * PART, 4 * PART], 2) == 4, "each has half of the GPU"
    assert stored([1, 1, 1], [4 * PART] * 3, 1) == 0, "there are more than run at once"
    assert stored([1, 1, 1], [4 * PART, 9, 9], 1) == 0
    assert stored([1, 1, 1], [8 * PART, 9, 9], 2) == 3, "the long one has the GPU almost for itself"


def test_padding_of_a_captured_step_is_not_read(make_attention: MakeAttention, assert_close: AssertClose) -> None:
    """Sequences without tokens behind the last one, whose rows of the block table are anything; tokens of nobody."""
    q, pool, batch = make_attention([5, 9], [5, 2 * PART + 9], 16, 8, 2, 64)
    padded_q = torch.cat((q, torch.randn(18, 8, 64).to(q)))
    tables = torch.cat((batch.block_tables[0], batch.block_tables[0].new_full((6, batch.block_tables[0].shape[1]), -1)))
    bounds = torch.cat((batch.cu_seqlens, batch.cu_seqlens.new_full((6,), 14)))
    lens = torch.cat((batch.seq_lens, batch.seq_lens.new_zeros(6)))
    padded = replace(batch, block_tables=(tables,), cu_seqlens=bounds, seq_lens=lens)
    out = attend(padded_q, pool, padded, workspace_of(pool, 8))
    assert_close(out[:14], expected_attention(q, pool, batch))
    assert out[14:].isnan().all(), "nobody's tokens are not written"
    alone = attend(q, pool, batch, workspace_of(pool, 8))
    assert torch.equal(out[:14], alone), "a graph computes the same bits"


def test_large_scores_do_not_overflow(make_attention: MakeAttention, assert_close: AssertClose) -> None:
    q, pool, batch = make_attention([20], [2 * PART + 75], 16, 2, 1, 64)
    q *= 30
    assert_close(attend(q, pool, batch, workspace_of(pool, 8), 1.0), expected_attention(q, pool, batch, 1.0))


def test_too_many_heads_for_a_tile_are_refused(make_attention: MakeAttention) -> None:
    q, pool, batch = make_attention([1], [1], 16, 65, 1, 32)
    assert tokens_of_tile(pool.dtype, 65, 1) == 0
    with pytest.raises(AssertionError, match="65 query heads"):
        attend(q, pool, batch, workspace_of(pool, 1))


@pytest.mark.parametrize(("num_kv", "num_sms"), [(8, 132), (3, 7), (40, 4)])
def test_its_bytes_are_known_before_it_is_made(num_kv: int, num_sms: int) -> None:
    gpu, device = gpu_of_size(num_sms, torch.device("cpu")), torch.device("meta")
    made = make_query_parts(num_kv, 128, gpu, device)
    tensors = (made.partial, made.maxima, made.sums, made.arrivals)
    assert query_parts_bytes(num_kv, 128, gpu) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("seeing", SEEING, ids=str)
def test_models_that_see_less_or_more(seeing: Seeing, make_attention: MakeAttention, assert_close: AssertClose) -> None:
    num_q, num_kv, head_dim, window, has_sinks = seeing
    q, pool, batch = make_attention([16, 70, 1, 40, 1], [16_000, 5001, 513, 40, 0], 16, *seeing[:4])
    sinks = random_sinks(num_q, q.device) if has_sinks else None
    workspace = make_query_parts(num_kv, head_dim, gpu_at(q.device), q.device)
    out = attend(q, pool, batch, workspace, None, window, sinks)
    assert_close(out, expected_attention(q, pool, batch, None, window, sinks))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_full_size_equals_reference(
    head_dim: int, block_size: int, cuda: torch.device, make_attention: MakeAttention, assert_close: AssertClose
) -> None:
    q, pool, batch = make_attention([16, 70, 1, 40, 1], [16_000, 5001, 513, 40, 0], block_size, 8, 2, head_dim)
    workspace = make_query_parts(2, head_dim, gpu_at(cuda), cuda)
    for sign in (1, -1):
        out = attend(sign * q, pool, batch, workspace)
        assert_close(out, expected_attention(sign * q, pool, batch))
