"""Norms, rotation, the write of K and V, and split attention in one kernel, against the reference. Hopper only.

Few shapes, since each is compiled anew: every value of every parameter is there, not every combination.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from common.kernels.decode_splits import PROGRAMS_PER_SM, DecodeWorkspace, make_workspace, num_splits_for
from common.kernels.fused_decode_attention import Division, division_for, fused_decode_attention, is_supported
from common.kernels.gpu import gpu_of
from common.kernels.operands import AttentionWeights
from common.ops import reference
from common.ops.base import ForwardBatch

AssertClose = Callable[[Tensor, Tensor], None]
MakePaged = Callable[[list[int], list[int], int, int, int], tuple[Tensor, ForwardBatch]]

LAYER = 1  # of the two of `make_paged`, the one that is not NaN
# Padding, few and many live splits, and a last one that is full, partly full, or has the new key only.
SEQ_LENS = [500, 0, 1, 2, 16, 17, 63, 64, 65, 66, 0, 128, 129, 1023, 1025, 4096, 4097, 4600]


@dataclass(frozen=True)
class Shape:
    num_q: int
    num_kv: int
    head_dim: int
    block_size: int
    num_splits: int
    has_norm: bool = True
    stages: int = 2


ONE_PART = Shape(8, 2, 128, 16, num_splits=1, stages=3)
MANY_PARTS = Shape(8, 2, 128, 16, num_splits=64, has_norm=False)
ODD_GROUP = Shape(5, 1, 128, 16, num_splits=8)
SHAPES = [
    ONE_PART,
    MANY_PARTS,
    ODD_GROUP,
    Shape(2, 2, 64, 16, num_splits=8),
    Shape(10, 2, 64, 64, num_splits=1, has_norm=False),
    Shape(8, 1, 128, 64, num_splits=2, stages=1),
    Shape(24, 2, 64, 16, num_splits=64),
    Shape(16, 1, 128, 32, num_splits=8, has_norm=False, stages=4),
]


@pytest.fixture(
    params=[
        pytest.param(("cuda", torch.float16), id="fp16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), id="bf16", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    if not torch.cuda.is_available() or not gpu_of(torch.device("cuda")).is_hopper:
        pytest.skip("needs a Hopper GPU")
    device, dtype = request.param
    return device, dtype


@dataclass(frozen=True)
class Step:
    """One new token of each sequence; all that must not be read is NaN, the new slots too."""

    qkv: Tensor  # [num_seqs, (num_q + 2 * num_kv) * head_dim], NaN for padding
    weights: AttentionWeights
    pool: Tensor  # [num_blocks, 2, 2, block_size, num_kv, head_dim]
    batch: ForwardBatch
    division: Division

    @property
    def slots(self) -> Tensor:
        """Of the new tokens: `[num_seqs]` int64, -1 for padding."""
        assert self.batch.slot_mapping is not None
        return self.batch.slot_mapping

    def written(self) -> Tensor:
        """Where in the pool the new keys and values belong: bool, of its shape."""
        slots = self.slots[self.slots >= 0]
        written = torch.zeros_like(self.pool, dtype=torch.bool)
        block_size = self.pool.shape[3]
        written[slots // block_size, LAYER, :, slots % block_size] = True
        return written

    def workspace(self, num_splits: int) -> DecodeWorkspace:
        """One with which contexts are divided into so many splits."""
        num_seqs, weights = self.qkv.shape[0], self.weights
        num_sms = -(-num_splits * num_seqs * weights.num_kv_heads // PROGRAMS_PER_SM)
        assert num_splits_for(num_seqs, weights.num_kv_heads, num_sms) == num_splits
        heads = weights.num_q_heads, weights.num_kv_heads
        return make_workspace(num_seqs, *heads, weights.head_dim, num_sms, self.qkv.device)

    def run(self, pool: Tensor, workspace: DecodeWorkspace, layer_id: int = LAYER, *, pdl: bool = False) -> Tensor:
        tables, seq_lens = self.batch.block_tables, self.batch.seq_lens
        return fused_decode_attention(
            self.qkv, self.weights, pool, layer_id, tables, seq_lens, workspace, pdl=pdl, division=self.division
        )

    def expected(self, pool: Tensor) -> Tensor:
        """The output by the reference, which writes to `pool`."""
        batch, weights = self.batch, self.weights
        k, v = pool[:, LAYER].unbind(1)
        q = reference.qk_norm_rope_kv(self.qkv, weights, batch.positions, self.slots, k, v)
        return reference.paged_attention(q, k, v, batch, weights.head_dim**-0.5).flatten(1)


MakeStep = Callable[[list[int], Shape], Step]


@pytest.fixture
def make_step(make_paged: MakePaged) -> MakeStep:
    def make(seq_lens: list[int], shape: Shape) -> Step:
        num_q, num_kv, head_dim = shape.num_q, shape.num_kv, shape.head_dim
        pool, batch = make_paged([1] * len(seq_lens), seq_lens, shape.block_size, num_kv, head_dim)
        batch = replace(batch, positions=(batch.seq_lens - 1).clamp(min=0))  # the reference looks up every position
        angles = torch.rand(max(seq_lens) + 1, head_dim // 2) * 6
        rope = torch.cat((angles.cos(), angles.sin()), dim=1).to(pool.device)
        norms = [(torch.rand(head_dim) + 0.5).to(pool) if shape.has_norm else None for _ in range(2)]
        qkv = torch.randn(len(seq_lens), (num_q + 2 * num_kv) * head_dim).to(pool)
        qkv[batch.seq_lens == 0] = float("nan")
        weights = AttentionWeights(norms[0], norms[1], 1e-6, rope, num_q, num_kv, head_dim)
        step = Step(qkv, weights, pool, batch, Division(shape.num_splits, shape.stages))
        pool[step.written()] = float("nan")
        return step

    return make


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference_to_the_bit_every_time(shape: Shape, make_step: MakeStep, assert_close: AssertClose) -> None:
    step = make_step(SEQ_LENS, shape)
    ours, theirs, workspace = step.pool.clone(), step.pool.clone(), step.workspace(shape.num_splits)
    out = step.run(ours, workspace)
    assert_close(out, step.expected(theirs))
    assert (out[step.batch.seq_lens == 0] == 0).all()

    written = step.written()
    assert torch.equal(ours.view(torch.int16)[~written], step.pool.view(torch.int16)[~written])
    assert_close(ours[written], theirs[written])
    values = written[:, LAYER, 1]
    assert torch.equal(ours[:, LAYER, 1][values], theirs[:, LAYER, 1][values])

    once = ours.clone()
    for _ in range(20):
        assert torch.equal(step.run(ours, workspace), out)
    assert torch.equal(ours.view(torch.int16), once.view(torch.int16))


@pytest.mark.parametrize("shape", [ONE_PART, ODD_GROUP], ids=str)
def test_only_padding(shape: Shape, make_step: MakeStep) -> None:
    step = make_step([0, 0, 0], shape)
    out = step.run(step.pool, step.workspace(shape.num_splits))
    assert (out == 0).all()
    assert step.pool.isnan().all()


def test_large_scores_do_not_overflow(make_step: MakeStep, assert_close: AssertClose) -> None:
    step = make_step([400, 1000], MANY_PARTS)
    step = replace(step, qkv=step.qkv * 30)
    ours, theirs = step.pool.clone(), step.pool.clone()
    assert_close(step.run(ours, step.workspace(MANY_PARTS.num_splits)), step.expected(theirs))


@pytest.mark.parametrize(("num_seqs", "num_splits"), [(1, 64), (8, 8), (64, 1)])
def test_overlapping_layers_of_a_graph_share_the_workspace(
    num_seqs: int, num_splits: int, make_step: MakeStep, assert_close: AssertClose, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq_lens = [int(n) for n in torch.randint(0, 500, (num_seqs,))]
    seq_lens[0] = 9001
    step = make_step(seq_lens, Shape(32, 8, 128, 16, num_splits))
    workspace = step.workspace(num_splits)
    pool = step.pool[:, LAYER:].repeat(1, 4, 1, 1, 1, 1)  # four layers alike
    steps = [replace(step, qkv=step.qkv * scale) for scale in (0.5, 1.0, 1.5, 2.0)]
    alone = []
    for layer, each in enumerate(steps):
        alone.append(each.run(pool, workspace, layer, pdl=True))
        torch.cuda.synchronize()
    assert_close(alone[1], step.expected(step.pool))
    monkeypatch.undo()  # kernels that poison would stand between the layers
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained = [each.run(pool, workspace, layer, pdl=True) for layer, each in enumerate(steps)]
    for _ in range(5):
        for out in chained:
            out.fill_(float("nan"))
        graph.replay()
        for ours, theirs in zip(chained, alone, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "block_size", "dtype", "supported"),
    [
        (32, 8, 128, 16, torch.bfloat16, True),
        (32, 2, 64, 64, torch.float16, True),
        (34, 2, 64, 64, torch.float16, False),  # more heads of a KV head than two small products have columns
        (32, 8, 128, 128, torch.bfloat16, False),
        (32, 8, 128, 8, torch.bfloat16, False),
        (32, 8, 96, 16, torch.bfloat16, False),
        (32, 8, 256, 16, torch.bfloat16, False),
        (32, 8, 128, 16, torch.float32, False),
    ],
)
def test_says_what_it_is_for(
    num_q: int, num_kv: int, head_dim: int, block_size: int, dtype: torch.dtype, supported: bool
) -> None:
    assert is_supported(num_q, torch.zeros(1, 1, 2, block_size, num_kv, head_dim, dtype=dtype)) == supported


@pytest.mark.parametrize(
    ("num_seqs", "division"),
    [(1, (64, 2)), (8, (8, 2)), (24, (2, 2)), (25, (1, 3)), (45, (1, 3)), (46, (1, 2)), (49, (1, 2)), (50, (1, 3))],
)
def test_divides_no_more_than_it_takes_to_fill_the_gpu(num_seqs: int, division: tuple[int, int]) -> None:
    assert division_for(num_seqs, 8, 132) == Division(*division)
