"""The GPU's operations against the reference's, over whole steps: a prompt in chunks, then decode."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from common.base.activation import Activation
from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.gpu import gpu_of
from common.ops.base import ForwardBatch, Norm, Residual, Weight
from common.ops.linear_plan import MIN_GATED_TOKENS
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection
from tests.support.attention_weights import attention_weights

pytestmark = pytest.mark.gpu

HIDDEN, INNER, VOCAB, NUM_Q, NUM_KV, HEAD_DIM, BLOCK_SIZE = 96, 160, 301, 8, 2, 64, 16
EPS = 1e-6


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Weights:
    table: Weight  # [VOCAB, HIDDEN]
    norm: Norm  # [HIDDEN]
    qkv: Weight
    attention: AttentionWeights
    o: Weight
    gate_up: Weight
    down: Weight
    scale: Tensor  # [1]


def make_weights(device: torch.device, dtype: torch.dtype, has_norm: bool) -> Weights:
    def random(*shape: int, factor: float = 1.0) -> Weight:
        return Weight(torch.randn(shape).mul(factor / shape[-1] ** 0.5).to(device, dtype))

    return Weights(
        table=random(VOCAB, HIDDEN, factor=10.0),
        norm=Norm((torch.rand(HIDDEN) + 0.5).to(device, dtype), EPS),
        qkv=random((NUM_Q + 2 * NUM_KV) * HEAD_DIM, HIDDEN),
        attention=attention_weights(NUM_Q, NUM_KV, HEAD_DIM, 600, device, dtype, has_norm=has_norm, eps=EPS),
        o=random(HIDDEN, NUM_Q * HEAD_DIM),
        gate_up=random(2 * INNER, HIDDEN),
        down=random(HIDDEN, INNER),
        scale=torch.full((1,), 0.7, device=device),
    )


def make_batch(chunks: list[tuple[int, int]], tables: Tensor) -> ForwardBatch:
    """Tokens [begin, end) of each sequence; a chunk (0, 0) is a row of padding with one token."""
    device = tables.device
    spans = [(begin, end) if end else (0, 1) for begin, end in chunks]
    positions = torch.cat([torch.arange(begin, end) for begin, end in spans])
    lengths = [end - begin for begin, end in spans]
    rows = torch.arange(len(chunks)).repeat_interleave(torch.tensor(lengths))
    slots = tables.cpu()[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    slots[torch.tensor([end for _, end in chunks])[rows] == 0] = -1
    return ForwardBatch(
        token_ids=torch.randint(0, VOCAB, (len(positions),), dtype=torch.int32).to(device),
        positions=positions.int().to(device),
        slots=(slots.to(device),),
        block_tables=(tables,),
        seq_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32, device=device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        last_tokens=torch.tensor(lengths, device=device).cumsum(0) - 1,
        max_query_len=max(lengths),
        max_seq_len=max(end for _, end in chunks),
    )


STEPS = [
    [(0, 200), (0, 33), (0, 1)],
    [(200, 330), (33, 34), (1, 90)],
    [(330, 346), (34, 40), (90, 130)],  # few tokens
    [(346, 347), (40, 41), (130, 131)],
    [(347, 348), (0, 0), (131, 132)],
]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("is_gemma", [False, True])
@pytest.mark.parametrize("choice", ["triton", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_a_layer_equals_the_reference(
    dtype: torch.dtype, tolerance: float, choice: str, is_gemma: bool, has_norm: bool, is_last: bool, cuda: torch.device
) -> None:
    from common.ops.base import GroupCache
    from common.ops.cuda_ops import CudaOps

    torch.manual_seed(11)
    weights = make_weights(cuda, dtype, has_norm)
    pools = torch.full((2, 70, 2, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM), float("nan"), dtype=dtype, device=cuda)
    tables = torch.randperm(70)[:66].view(3, 22).int().to(cuda)
    families: dict[str, Any] = {field.name: choice for field in dataclasses.fields(KernelsSection) if field.type is str}
    kernels = dataclasses.replace(KernelsSection(), **families)
    both = (CudaOps([GroupCache(pools[0], NUM_Q)], kernels, 3), TorchOps([GroupCache(pools[1], NUM_Q)]))
    for step in STEPS:
        whole = make_batch(step, tables)
        logits = []
        for ops in both:
            decodes = whole.max_query_len == 1 and not is_last
            batch = ops.begin(dataclasses.replace(whole, slots=()) if decodes else whole)
            x = ops.embed(batch.token_ids, weights.table, HIDDEN**0.5 if is_gemma else 1.0)
            qkv = ops.norm_linear(x, weights.norm, weights.qkv)
            attend = ops.attention_of_last if is_last else ops.attention
            attended = attend(qkv, weights.attention, 1, batch)
            x = Residual(x.rows[batch.last_tokens]) if is_last else x
            if is_gemma:
                x = ops.linear_norm_add(attended, weights.o, weights.norm, x, weights.scale)
                gated = ops.norm_gate_up(x, weights.norm, weights.gate_up, Activation.GELU_TANH)
                x = ops.linear_norm_add(gated, weights.down, weights.norm, x)
                logits.append(ops.logits(x, weights.norm, weights.table, 3.0))
                continue
            x = ops.linear_add(attended, weights.o, x)
            x = ops.linear_add(ops.norm_gate_up(x, weights.norm, weights.gate_up), weights.down, x)
            logits.append(ops.logits(x, weights.norm, weights.table))
        ours, theirs = logits
        assert ours.dtype == torch.float32 and ours.isfinite().all()
        [slots] = whole.slots
        kept = (slots[whole.last_tokens] if is_last else slots) >= 0
        assert (ours - theirs)[kept].norm() <= tolerance * theirs[kept].norm()
    assert torch.equal(pools[0].isnan(), pools[1].isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gate_of_many_tokens_equals_the_reference(dtype: torch.dtype, cuda: torch.device) -> None:
    """On Hopper, another kernel's work than that of few."""
    from common.ops.base import GroupCache
    from common.ops.cuda_ops import CudaOps

    torch.manual_seed(12)
    weights = make_weights(cuda, dtype, has_norm=True)
    pool = torch.zeros((1, 1, 2, BLOCK_SIZE, NUM_KV, HEAD_DIM), dtype=dtype, device=cuda)
    x = torch.randn(MIN_GATED_TOKENS + 7, HIDDEN).to(cuda, dtype)
    ops, reference = CudaOps([GroupCache(pool, NUM_Q)], KernelsSection(), 1), TorchOps([GroupCache(pool, NUM_Q)])
    ours, theirs = (each.norm_gate_up(Residual(x), weights.norm, weights.gate_up) for each in (ops, reference))
    assert (ours.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()


def test_graphs_need_every_decode_kernel(cuda: torch.device) -> None:
    from common.ops.base import GroupCache
    from common.ops.cuda_ops import CudaOps

    caches = [GroupCache(torch.zeros((1, 1, 2, 16, 1, 64), device=cuda), 1)]
    assert CudaOps(caches, KernelsSection(), 1).graph_safe
    assert CudaOps(caches, KernelsSection(prefill_attention="torch"), 1).graph_safe
    assert not CudaOps(caches, KernelsSection(decode_attention="torch"), 1).graph_safe
    assert not CudaOps(caches, KernelsSection(rope="torch"), 1).graph_safe


def test_attention_is_fused_on_hopper(cuda: torch.device) -> None:
    from common.ops.base import GroupCache
    from common.ops.cuda_attention import CudaAttention

    def is_fused(pool: Tensor, kernels: KernelsSection) -> bool:
        return CudaAttention(GroupCache(pool, 8), kernels, 1, pdl=False).is_fused

    pool = torch.zeros((1, 1, 2, 16, 2, 64), device=cuda, dtype=torch.bfloat16)
    assert is_fused(pool, KernelsSection()) == gpu_of(cuda).is_hopper
    assert not is_fused(pool.float(), KernelsSection())
    assert not is_fused(pool, KernelsSection(decode_attention="torch"))
    assert not is_fused(pool, KernelsSection(rope="torch"))
