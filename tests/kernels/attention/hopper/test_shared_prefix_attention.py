"""Rows that share blocks attend to what they would attend to alone, however they share them. Hopper only."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.kernels.attention.hopper.shared_prefix_attention import shared_prefix_attention
from common.kernels.attention.shared_division import bundle_queries, share, tokens_of_bundle
from common.kernels.attention.shared_parts import make_shared_parts
from common.kernels.base.attention_operands import SharedDivision, SharedParts, SharedPrefixes
from tests.kernels.attention.hopper.decode_steps import LAYER, MakeStep, Shape, Step, check_overlapping_layers
from tests.kernels.conftest import AssertClose

SHAPES = [
    Shape(32, 8, 128, 16, num_slots=264, programs_per_sm=2),
    Shape(8, 2, 128, 16, num_slots=2700, has_norm=False),
    Shape(5, 1, 128, 64, num_slots=60),
    Shape(4, 4, 64, 16, num_slots=396),
    Shape(16, 1, 128, 32, num_slots=1, programs_per_sm=2),
    Shape(24, 2, 64, 16, num_slots=396, has_norm=False),
    Shape(14, 2, 128, 16, num_slots=396, has_norm=False, has_bias=True),
    Shape(64, 8, 64, 16, num_slots=396, has_norm=False, has_bias=True, has_sinks=True),
    Shape(8, 2, 128, 16, num_slots=264, programs_per_sm=2, has_factors=True, norms_values=True, shares_kv=True),
]


@dataclass(frozen=True)
class Group:
    """Rows that begin with the same tokens."""

    num_tokens: int
    seq_lens: Sequence[int]


# Nothing that is shared, alone or padding; more rows than attend together; parts of two, three and more tiles, in one
# group too; fewer tokens than a run has; a new key right behind what is shared; tokens that end inside a tile or a run.
GROUPS = [
    Group(0, [700, 0, 1]),
    Group(512, [513, 600, 1200, 640, *range(700, 740)]),
    Group(5000, [5001, 6143, 6144, 6145, 6500, 5100, 9300]),
    Group(64, [65, 400, 401]),
    Group(1024 + 192, [1400, 1409]),
    Group(768, [1000]),
    Group(9216, [9216 + 1, 9300, 9400, 12_300, 9700]),
]


def sharing(make_step: MakeStep, groups: Sequence[Group], shape: Shape) -> tuple[Step, SharedPrefixes]:
    """A step of all groups, whose rows are mixed, and what they share; blocks that nobody has are NaN."""
    members = [(number, seq_len) for number, group in enumerate(groups) for seq_len in group.seq_lens]
    members = [members[i] for i in torch.randperm(len(members)).tolist()]
    step = make_step([seq_len for _, seq_len in members], shape)
    tables, leaders = step.batch.block_tables[0], dict[int, int]()
    pool = step.pool
    for row, (number, _) in enumerate(members):
        count = groups[number].num_tokens // shape.block_size
        leader = leaders.setdefault(number, row)
        if leader != row and count > 0:
            pool[tables[row, :count].long()] = float("nan")
            tables[row, :count] = tables[leader, :count]
    num_tokens = [groups[number].num_tokens for number, _ in members]
    numbers = [number if tokens else -1 for (number, _), tokens in zip(members, num_tokens, strict=True)]
    columns = torch.tensor([numbers, num_tokens], dtype=torch.int32, device=pool.device)
    return step, SharedPrefixes(numbers=columns[0].clone(), num_tokens=columns[1].clone())


def parts_of(step: Step, num_rows: int, num_slots: int) -> SharedParts:
    return make_shared_parts(num_rows, num_slots, step.shape.num_kv, step.shape.head_dim, step.qkv.device)


def divided(step: Step, prefixes: SharedPrefixes, num_slots: int, num_rows: int = 0) -> SharedDivision:
    """As for a batch of `num_rows`, or of its own size."""
    shape, seq_lens = step.shape, step.batch.seq_lens
    queries = bundle_queries(num_rows or len(seq_lens), shape.num_q, shape.num_kv)
    tokens = tokens_of_bundle(queries, shape.num_q, shape.num_kv)
    return share(prefixes, seq_lens, tokens, shape.num_kv, num_slots)


def attend(
    step: Step, pool: Tensor, division: SharedDivision, parts: SharedParts, layer_id: int = LAYER, *, pdl: bool = False
) -> None:
    tables, seq_lens = step.batch.block_tables[0], step.batch.seq_lens
    k_cache, v_cache = pool[:, layer_id].unbind(1)
    shared_prefix_attention(step.qkv, step.weights, k_cache, v_cache, tables, seq_lens, division, parts, pdl=pdl)


def run(step: Step, pool: Tensor, division: SharedDivision, parts: SharedParts) -> Tensor:
    """Both kernels."""
    attend(step, pool, division, parts)
    return step.run(pool, step.workspace(), shared=division, before=parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference_every_time(shape: Shape, make_step: MakeStep, assert_close: AssertClose) -> None:
    step, prefixes = sharing(make_step, GROUPS, shape)
    expected = step.expected(step.pool.clone())
    alone = step.run(step.pool.clone(), step.workspace())
    for num_slots, num_rows in ((1, 1), (40, 99), (264, 1), (264, 99), (5000, 99)):
        division = divided(step, prefixes, num_slots, num_rows)
        shares = division.own_begins > 0
        assert shares.sum() > 40
        parts = parts_of(step, len(alone) + 3, num_slots)
        out = run(step, step.pool.clone(), division, parts)
        assert_close(out, expected)
        assert torch.equal(out[~shares], alone[~shares])
        for _ in range(5):
            assert torch.equal(run(step, step.pool.clone(), division, parts), out), f"{num_slots} programs"


def test_shared_blocks_are_read_by_one_row_of_those_that_attend_together(make_step: MakeStep) -> None:
    """The others' tables may say anything there, so nothing is read twice."""
    step, prefixes = sharing(make_step, [Group(1024, [1200] * 16)], SHAPES[0])
    division, parts = divided(step, prefixes, 264), parts_of(step, 16, 264)
    out = run(step, step.pool.clone(), division, parts)
    step.batch.block_tables[0][1:, : 1024 // 16] = 1 << 30
    assert torch.equal(run(step, step.pool.clone(), division, parts), out)


def test_nothing_shared(make_step: MakeStep) -> None:
    step, prefixes = sharing(make_step, [Group(0, [500, 0, 9000, 1])], SHAPES[0])
    alone = step.run(step.pool.clone(), step.workspace())
    assert torch.equal(run(step, step.pool.clone(), divided(step, prefixes, 264), parts_of(step, 4, 264)), alone)


@pytest.mark.parametrize(("num_rows", "num_slots"), [(2, 264), (64, 264), (64, 1)])
def test_overlapping_layers_of_a_graph(
    num_rows: int, num_slots: int, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [Group(4096, [4097 + 20 * i for i in range(num_rows)]), Group(512, [600, 3000])]
    step, prefixes = sharing(make_step, groups, SHAPES[0])
    division, workspace = divided(step, prefixes, num_slots), step.workspace()
    parts = parts_of(step, 66, num_slots)

    def run_layer(each: Step, pool: Tensor, layer: int) -> Tensor:
        attend(each, pool, division, parts, layer, pdl=True)
        return each.run(pool, workspace, layer, shared=division, before=parts, pdl=True)

    check_overlapping_layers(step, run_layer, monkeypatch)
