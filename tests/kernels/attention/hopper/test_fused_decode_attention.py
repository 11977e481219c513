"""Norms, rotation, the write of K and V, and divided attention in one kernel, against the reference. Hopper only.

Few shapes, since each is compiled anew: every value of every parameter is there, not every combination.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.kernels.attention.hopper.fused_decode_attention import is_supported
from tests.kernels.attention.hopper.decode_steps import LAYER, MakeStep, Shape, Step, check_overlapping_layers
from tests.kernels.conftest import AssertClose

# Padding, few and many parts, and a last one that is full, partly full, or has the new key only.
SEQ_LENS = [500, 0, 1, 2, 16, 17, 63, 64, 65, 66, 0, 128, 129, 1023, 1025, 4096, 4097, 4600]


ONE_PART = Shape(8, 2, 128, 16, num_slots=1, programs_per_sm=2)
MANY_PARTS = Shape(8, 2, 128, 16, num_slots=2700, has_norm=False)
ODD_GROUP = Shape(5, 1, 128, 16, num_slots=396)
SHAPES = [
    ONE_PART,
    MANY_PARTS,
    ODD_GROUP,
    Shape(2, 2, 64, 16, num_slots=396),
    Shape(10, 2, 64, 64, num_slots=1, has_norm=False),
    Shape(8, 1, 128, 64, num_slots=60),
    Shape(24, 2, 64, 16, num_slots=2700),
    Shape(14, 2, 128, 16, num_slots=396, has_norm=False, has_bias=True),
    Shape(16, 1, 128, 32, num_slots=396, has_norm=False, programs_per_sm=2),
    Shape(64, 8, 64, 16, num_slots=396, has_norm=False, has_bias=True, window=128, has_sinks=True),
    Shape(8, 1, 64, 32, num_slots=2700, has_norm=False, has_sinks=True),
    Shape(8, 4, 256, 16, num_slots=132, programs_per_sm=1, window=1024),
    Shape(8, 4, 256, 64, num_slots=2700, programs_per_sm=1),
    Shape(16, 1, 256, 32, num_slots=1, programs_per_sm=1, has_bias=True),
    Shape(8, 2, 128, 32, num_slots=1, has_norm=False, has_factors=True, window=1),
    Shape(32, 8, 128, 16, num_slots=2700, has_norm=False, window=4095, programs_per_sm=2),
    Shape(16, 8, 256, 16, num_slots=132, programs_per_sm=1, norms_values=True, window=77),
    Shape(6, 2, 128, 64, num_slots=60, norms_values=True, shares_kv=True, has_factors=True, has_sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference_to_the_bit_every_time(shape: Shape, make_step: MakeStep, assert_close: AssertClose) -> None:
    step = make_step(SEQ_LENS, shape)
    ours, theirs, workspace = step.pool.clone(), step.pool.clone(), step.workspace()
    out = step.run(ours, workspace)
    assert_close(out, step.expected(theirs))
    assert (out[step.batch.seq_lens == 0] == 0).all()

    written = step.written()
    assert torch.equal(ours.view(torch.int16)[~written], step.pool.view(torch.int16)[~written])
    assert_close(ours[written], theirs[written])
    values = written[:, LAYER, 1]
    if not shape.norms_values:
        assert torch.equal(ours[:, LAYER, 1][values], theirs[:, LAYER, 1][values])

    once = ours.clone()
    for _ in range(20):
        assert torch.equal(step.run(ours, workspace), out)
    assert torch.equal(ours.view(torch.int16), once.view(torch.int16))


@pytest.mark.parametrize("shape", [ONE_PART, ODD_GROUP], ids=str)
def test_only_padding(shape: Shape, make_step: MakeStep) -> None:
    step = make_step([0, 0, 0], shape)
    out = step.run(step.pool, step.workspace())
    assert (out == 0).all()
    assert step.pool.isnan().all()


def test_large_scores_do_not_overflow(make_step: MakeStep, assert_close: AssertClose) -> None:
    step = make_step([400, 1000], MANY_PARTS)
    step = replace(step, qkv=step.qkv * 30)
    ours, theirs = step.pool.clone(), step.pool.clone()
    assert_close(step.run(ours, step.workspace()), step.expected(theirs))


@pytest.mark.parametrize("shape", [ONE_PART, replace(ONE_PART, window=1030, has_sinks=True)], ids=str)
def test_a_sequence_has_the_same_bits_in_any_company(shape: Shape, make_step: MakeStep) -> None:
    """Alone and cut to the last part, or whole among many, with more or fewer tiles on the way."""
    step = make_step(SEQ_LENS, shape)
    together = step.run(step.pool.clone(), step.workspace())
    for row, seq_len in enumerate(SEQ_LENS):
        one = slice(row, row + 1)
        batch = replace(step.batch, block_tables=(step.batch.block_tables[0][one],), seq_lens=step.batch.seq_lens[one])
        for num_slots, programs_per_sm in ((2700, 3), (80, 2)):
            shape = replace(step.shape, num_slots=num_slots, programs_per_sm=programs_per_sm)
            alone = replace(step, qkv=step.qkv[one], batch=batch, shape=shape)
            assert torch.equal(alone.run(step.pool.clone(), alone.workspace()), together[one]), f"{seq_len} tokens"


@pytest.mark.parametrize(("num_seqs", "num_slots"), [(1, 396), (8, 396), (64, 264), (64, 1)])
def test_overlapping_layers_of_a_graph_share_the_workspace(
    num_seqs: int, num_slots: int, make_step: MakeStep, assert_close: AssertClose, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq_lens = [int(n) for n in torch.randint(0, 500, (num_seqs,))]
    seq_lens[0] = 9001
    step = make_step(seq_lens, Shape(32, 8, 128, 16, num_slots))
    workspace = step.workspace()

    def run_layer(each: Step, pool: Tensor, layer: int) -> Tensor:
        return each.run(pool, workspace, layer, pdl=True)

    alone = check_overlapping_layers(step, run_layer, monkeypatch)
    assert_close(alone, step.expected(step.pool))


@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "block_size", "dtype", "supported"),
    [
        (32, 8, 128, 16, torch.bfloat16, True),
        (32, 2, 64, 64, torch.float16, True),
        (34, 2, 64, 64, torch.float16, False),  # more heads of a KV head than two small products have columns
        (32, 8, 128, 128, torch.bfloat16, False),
        (32, 8, 128, 8, torch.bfloat16, False),
        (32, 8, 96, 16, torch.bfloat16, False),
        (32, 8, 256, 16, torch.bfloat16, True),
        (32, 8, 512, 16, torch.bfloat16, False),
        (32, 8, 128, 16, torch.float8_e4m3fn, True),
        (32, 8, 128, 16, torch.float32, False),
    ],
)
def test_says_what_it_is_for(
    num_q: int, num_kv: int, head_dim: int, block_size: int, dtype: torch.dtype, supported: bool
) -> None:
    assert is_supported(num_q, torch.zeros(1, 1, 2, block_size, num_kv, head_dim, dtype=dtype)) == supported
