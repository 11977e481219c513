"""Keys and values in e4m3 on Hopper: a step in one kernel, shared prefixes, long prompts, long contexts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from common.kernels.attention.hopper.shared_prefix_attention import shared_prefix_attention
from common.kernels.base.attention_operands import SharedDivision
from common.ops import reference
from tests.kernels.attention import test_decode_attention, test_prefill_attention
from tests.kernels.attention.hopper import test_long_attention
from tests.kernels.attention.hopper.decode_steps import LAYER, MakeStep, Shape, Step
from tests.kernels.attention.hopper.test_fused_decode_attention import ONE_PART, SEQ_LENS, SHAPES
from tests.kernels.attention.hopper.test_shared_prefix_attention import GROUPS, divided, parts_of, sharing
from tests.kernels.attention.test_e4m3 import check, few_queries
from tests.kernels.conftest import AssertClose, MakeAttention
from tests.kernels.e4m3 import E4M3, K_SCALE, V_SCALE, differing, narrow, on_cpu, weights_on_cpu

LONG = 131_072  # keys


BIASED_NORMED = Shape(6, 2, 64, 16, num_slots=396, has_bias=True, norms_values=True)


def scaled(step: Step) -> Step:
    """The step with scales of a cache."""
    return replace(step, weights=replace(step.weights, k_scale=K_SCALE, v_scale=V_SCALE))


def expected(step: Step, pool: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a step over a pool of e4m3 numbers, and the pool behind it: by the reference."""
    pool, batch, weights = pool.cpu(), on_cpu(step.batch), weights_on_cpu(step.weights)
    k, v = pool[:, LAYER].unbind(1)
    q = reference.qk_norm_rope_kv(step.qkv.cpu(), weights, batch.positions, step.slots.cpu(), k, v)
    out = reference.cache_attention(q, weights, k, v, batch.block_tables[0], batch).flatten(1)
    return out.to(step.qkv.device), pool


def check_step(
    step: Step, run: Callable[[Tensor], Tensor], assert_close: AssertClose, *, are_values_exact: bool = True
) -> None:
    """Output and pool are those of the reference, and no other byte is written; every time the same."""
    pool = narrow(step.pool)
    ours = pool.clone()
    out = run(ours)
    law, theirs = expected(step, pool)
    assert_close(out, law)
    assert (out[step.batch.seq_lens == 0] == 0).all()
    written = step.written().cpu()
    once, before = ours.view(torch.uint8).clone(), pool.view(torch.uint8)
    assert torch.equal(once.masked_fill(step.written(), 0), before.masked_fill(step.written(), 0))
    assert differing(ours.cpu()[written], theirs[written]) < 0.01
    values = written[:, LAYER, 1]
    if are_values_exact:
        assert torch.equal(once.cpu()[:, LAYER, 1][values], theirs.view(torch.uint8)[:, LAYER, 1][values])
    for _ in range(10):
        assert torch.equal(run(ours), out)
    assert torch.equal(ours.view(torch.uint8), once)


@pytest.fixture(params=[pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest, hopper: torch.device) -> tuple[str, torch.dtype]:
    """Most tests have bfloat16 alone: numbers are multiplied in float16 whatever the model is in."""
    return hopper.type, request.param


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        *(pytest.param(torch.bfloat16, shape, marks=pytest.mark.gpu) for shape in SHAPES),
        *(pytest.param(torch.float16, shape, marks=pytest.mark.gpu) for shape in (ONE_PART, BIASED_NORMED)),
    ],
    indirect=["target"],
    ids=str,
)
def test_a_step_in_one_kernel(shape: Shape, make_step: MakeStep, assert_close: AssertClose) -> None:
    step = scaled(make_step(SEQ_LENS, shape))
    workspace = step.workspace()
    run = partial(step.run, workspace=workspace)
    check_step(step, run, assert_close, are_values_exact=not shape.norms_values)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(32, 8, 128, 16, num_slots=264, programs_per_sm=2),
        Shape(14, 2, 128, 16, num_slots=396, has_norm=False, has_bias=True),
        Shape(64, 8, 64, 16, num_slots=396, has_norm=False, has_bias=True, has_sinks=True),
    ],
    ids=str,
)
def test_a_step_with_shared_prefixes(shape: Shape, make_step: MakeStep, assert_close: AssertClose) -> None:
    step, prefixes = sharing(make_step, GROUPS, shape)
    step = scaled(step)
    num_slots = 264
    division: SharedDivision = divided(step, prefixes, num_slots)
    before, workspace = parts_of(step, len(step.qkv), num_slots), step.workspace()

    def run(pool: Tensor) -> Tensor:
        k, v = pool[:, LAYER].unbind(1)
        rows = (step.batch.block_tables[0], step.batch.seq_lens)
        shared_prefix_attention(step.qkv, step.weights, k, v, *rows, division, before)
        return step.run(pool, workspace, shared=division, before=before)

    check_step(step, run, assert_close)


@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (200, True)])
@pytest.mark.parametrize("heads", [(16, 2, 64), (8, 2, 128), (8, 4, 256)], ids=str)
def test_long_prompts(
    heads: tuple[int, int, int],
    window: int,
    has_sinks: bool,
    make_attention: MakeAttention,
    assert_close: AssertClose,
) -> None:
    lens = (test_long_attention.QUERY_LENS, test_long_attention.SEQ_LENS, 16)
    q, pool, batch = make_attention(*lens, *heads, window)
    attend = partial(test_long_attention.attend, q)
    check(attend, q, pool, batch, window, has_sinks, E4M3, assert_close)


@pytest.mark.parametrize("num_slots", [1, 396])
def test_a_sequence_has_the_same_bits_in_any_company(num_slots: int, make_step: MakeStep) -> None:
    """Alone and cut to the last part, or whole among others, with more or fewer tiles on the way."""
    seq_lens = [1, 63, 129, 1025, 4600]
    step = scaled(make_step(seq_lens, Shape(8, 2, 128, 16, num_slots=num_slots, programs_per_sm=2)))
    pool = narrow(step.pool)
    together = step.run(pool.clone(), step.workspace())
    for row, seq_len in enumerate(seq_lens):
        one = slice(row, row + 1)
        batch = replace(step.batch, block_tables=(step.batch.block_tables[0][one],), seq_lens=step.batch.seq_lens[one])
        shape = replace(step.shape, num_slots=2700, programs_per_sm=3)
        alone = replace(step, qkv=step.qkv[one], batch=batch, shape=shape)
        assert torch.equal(alone.run(pool.clone(), alone.workspace()), together[one]), f"{seq_len} tokens"


@pytest.mark.parametrize(
    ("name", "num_queries"),
    [("decode", 1), ("few", 1), ("few", 40), ("prefill", 40), ("prefill", 700), ("long", 40), ("long", 700)],
)
def test_nothing_is_lost_in_the_sum_over_a_long_context(
    name: str, num_queries: int, make_attention: MakeAttention
) -> None:
    """Values of one give one; of a needle that a query finds, its value comes out, wherever it lies."""
    attend: Any = {
        "decode": partial(test_decode_attention.attend, num_slots=396),
        "few": few_queries,
        "prefill": test_prefill_attention.attend,
        "long": test_long_attention.attend,
    }[name]
    q, pool, batch = make_attention([num_queries], [LONG], 64, 4, 1, 128)
    pool[:, 1, 1] = 1.0
    pool[:, 1, 0] *= 0.1
    numbers = narrow(pool)
    out = attend(q, numbers, batch)
    assert (out.float() - 1.0).abs().max() <= 4e-3
    blocks = batch.block_tables[0][0].long()
    needle = torch.tensor([4.0, -3.0]).to(E4M3).view(torch.uint8)[:, None, None].to(pool.device)
    for place in (0, 77_777, LONG - num_queries):
        hay = numbers.clone()
        hay.view(torch.uint8)[blocks[place // 64], 1, :, place % 64] = needle
        out = attend(torch.ones_like(q), hay, batch)  # the needle's score is 45 above the others'
        assert (out.float() + 3.0).abs().max() <= 2e-2


def test_a_long_context_in_one_kernel(make_step: MakeStep, assert_close: AssertClose) -> None:
    step = scaled(make_step([LONG, 5000], Shape(8, 2, 128, 16, num_slots=396)))
    check_step(step, partial(step.run, workspace=step.workspace()), assert_close)


def test_large_queries_stay_finite(make_step: MakeStep) -> None:
    """Beyond the largest number of float16, in which they are multiplied."""
    step = make_step([400], Shape(8, 2, 128, 16, num_slots=1, has_norm=False))
    step = replace(step, qkv=step.qkv * 1e6)
    assert step.run(narrow(step.pool), step.workspace()).isfinite().all()
