"""Attention over keys and values in e4m3 against the reference over the numbers that they stand for."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from common.kernels.attention.gather_kv import gather_kv
from common.kernels.attention.query_parts import make_query_parts
from common.ops.base import ForwardBatch
from tests.kernels.attention import test_decode_attention, test_few_query_attention, test_prefill_attention
from tests.kernels.conftest import AssertClose, AttentionCase, MakeAttention, MakePaged, random_sinks
from tests.kernels.e4m3 import K_SCALE, V_SCALE, attended, narrow

CASES = [
    ([5, 40, 1, 32], [5, 700, 65, 0], 16, 4, 2, 64),
    ([33, 2], [333, 50], 32, 3, 1, 128),
    ([1, 19], [1, 300], 64, 2, 1, 256),
    ([7], [80], 16, 2, 2, 512),
]


def few_queries(q: Tensor, pool: Tensor, batch: ForwardBatch, **seeing: Any) -> Tensor:
    """With contexts cut for many programs."""
    num_kv, head_dim = pool.shape[4:]
    gpu = test_few_query_attention.gpu_of_size(40, q.device)
    workspace = make_query_parts(num_kv, head_dim, gpu, q.device)
    return test_few_query_attention.attend(q, pool, batch, workspace, **seeing)


@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (70, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("attend", [test_prefill_attention.attend, few_queries])
def test_prompts(
    attend: Any,
    case: AttentionCase,
    window: int,
    has_sinks: bool,
    cache: torch.dtype,
    make_attention: MakeAttention,
    assert_close: AssertClose,
) -> None:
    q, pool, batch = make_attention(*case, window)
    check(partial(attend, q), q, pool, batch, window, has_sinks, cache, assert_close)


@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (130, True)])
@pytest.mark.parametrize("num_slots", [1, 396])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_decode_steps(
    head_dim: int,
    num_slots: int,
    window: int,
    has_sinks: bool,
    cache: torch.dtype,
    make_paged: MakePaged,
    assert_close: AssertClose,
) -> None:
    seq_lens = [700, 0, 1, 64, 129]
    pool, batch = make_paged([1] * len(seq_lens), seq_lens, 16, 2, head_dim, window)
    q = torch.randn(len(seq_lens), 6, head_dim).to(pool)
    attend = partial(test_decode_attention.attend, num_slots=num_slots)
    check(partial(attend, q), q, pool, batch, window, has_sinks, cache, assert_close)


def check(
    attend: Any,
    q: Tensor,
    pool: Tensor,
    batch: ForwardBatch,
    window: int,
    has_sinks: bool,
    cache: torch.dtype,
    assert_close: AssertClose,
) -> None:
    numbers, scale = narrow(pool), q.shape[2] ** -0.5
    sinks = random_sinks(q.shape[1], q.device) if has_sinks else None
    out = attend(numbers.view(cache), batch, scale=scale * K_SCALE, window=window, sinks=sinks, v_scale=V_SCALE)
    assert_close(out, attended(q, numbers, batch, scale, window, sinks))


def test_keys_are_gathered_in_the_type_of_queries(
    cache: torch.dtype, dtype: torch.dtype, make_paged: MakePaged
) -> None:
    seq_lens = [129, 300]
    pool, batch = make_paged([1, 1], seq_lens, 16, 2, 64)
    numbers, count = narrow(pool), torch.zeros(1, dtype=torch.int32, device=pool.device)
    k, v = numbers.view(cache)[:, 1].unbind(1)
    kv = gather_kv(k, v, batch.block_tables[0], batch.seq_lens, sum(seq_lens), dtype=dtype, zeroed=count)
    assert kv.dtype == dtype
    begin = 0
    for row, seq_len in enumerate(seq_lens):
        blocks = batch.block_tables[0][row, : -(-seq_len // 16)].long().cpu()
        for rows, plane in zip(kv, (0, 1), strict=True):
            expected = numbers.cpu().float()[blocks, 1, plane].flatten(0, 1)[:seq_len].flatten(1)
            assert torch.equal(rows[begin : begin + seq_len].cpu().float(), expected)
        begin += 256
