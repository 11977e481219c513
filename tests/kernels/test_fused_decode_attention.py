"""Norms, rotation, the write of K and V, and divided attention in one kernel, against the reference. Hopper only.

Few shapes, since each is compiled anew: every value of every parameter is there, not every combination.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from common.kernels.decode_division import divide, limits_for
from common.kernels.decode_parts import PartsWorkspace, make_workspace
from common.kernels.fused_decode_attention import fused_decode_attention, is_supported
from common.kernels.gpu import gpu_of
from common.kernels.operands import AttentionWeights
from common.ops import reference
from common.ops.base import ForwardBatch

AssertClose = Callable[[Tensor, Tensor], None]
MakePaged = Callable[[list[int], list[int], int, int, int], tuple[Tensor, ForwardBatch]]

LAYER = 1  # of the two of `make_paged`, the one that is not NaN
# Padding, few and many parts, and a last one that is full, partly full, or has the new key only.
SEQ_LENS = [500, 0, 1, 2, 16, 17, 63, 64, 65, 66, 0, 128, 129, 1023, 1025, 4096, 4097, 4600]


@dataclass(frozen=True)
class Shape:
    num_q: int
    num_kv: int
    head_dim: int
    block_size: int
    num_slots: int  # programs that contexts are divided for: the more, the more are cut
    has_norm: bool = True
    programs_per_sm: int = 3


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
    Shape(16, 1, 128, 32, num_slots=396, has_norm=False, programs_per_sm=2),
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
    shape: Shape

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

    def workspace(self) -> PartsWorkspace:
        shape = self.shape
        limits = limits_for(self.qkv.shape[0], shape.num_kv, shape.num_slots)
        return make_workspace(limits.max_joins, shape.num_q, shape.num_kv, shape.head_dim, self.qkv.device)

    def run(self, pool: Tensor, workspace: PartsWorkspace, layer_id: int = LAYER, *, pdl: bool = False) -> Tensor:
        return fused_decode_attention(
            qkv=self.qkv,
            weights=self.weights,
            kv_cache=pool,
            layer_id=layer_id,
            block_tables=self.batch.block_tables[0],
            seq_lens=self.batch.seq_lens,
            division=divide(self.batch.seq_lens, self.shape.num_kv, self.shape.num_slots, pool.shape[1]),
            workspace=workspace,
            programs_per_sm=self.shape.programs_per_sm,
            pdl=pdl,
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
        weights = AttentionWeights(
            q_norm=norms[0],
            k_norm=norms[1],
            norm_eps=1e-6,
            rope=rope,
            num_q_heads=num_q,
            num_kv_heads=num_kv,
            head_dim=head_dim,
        )
        step = Step(qkv, weights, pool, batch, shape)
        pool[step.written()] = float("nan")
        return step

    return make


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


def test_a_sequence_has_the_same_bits_in_any_company(make_step: MakeStep) -> None:
    """Alone and cut to the last part, or whole among many, with more or fewer tiles on the way."""
    step = make_step(SEQ_LENS, ONE_PART)
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
