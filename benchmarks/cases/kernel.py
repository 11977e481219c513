"""Cases of `benchmarks.kernels`: kernels alone at Qwen3-4B's shapes, and helpers of the decode cases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product, starmap

import torch
from torch import Tensor

from common.base.activation import Activation
from common.device.steps.adjustments import Adjustments, SlotFill
from common.device.steps.warm_up import sampling_tensors
from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.gpu import gpu_of
from common.kernels.base.sampling_operands import MAX_LOGPROBS
from common.kernels.elementwise.embedding import embedding
from common.kernels.elementwise.gate_mul import gate_mul
from common.kernels.elementwise.gather_blocks import gather_blocks
from common.kernels.elementwise.qk_norm_rope_kv import qk_norm_rope_kv
from common.kernels.elementwise.rms_norm import rms_norm
from common.kernels.products.gated_gemm import gated_gemm
from common.kernels.sampling import sampling
from common.kernels.sampling.adjust_logits import adjust_logits
from common.kernels.sampling.logprobs import logprobs
from common.ops import reference
from common.ops.base import ForwardBatch
from common.wire.values.sampling_params import SamplingParams

HIDDEN, INNER, VOCAB, NUM_Q, NUM_KV, HEAD_DIM, BLOCK_SIZE = 2560, 9728, 151_936, 32, 8, 128, 16
QKV = (NUM_Q + 2 * NUM_KV) * HEAD_DIM
EPS = 1e-6
SCALE = HEAD_DIM**-0.5
TOKEN_BYTES = 2 * NUM_KV * HEAD_DIM * 2  # K and V of one layer, bf16
ROTATED_BYTES = 256 << 20  # several times the L2 cache
MAX_STEP_TOKENS = 256  # above, a case stands for a prompt step, launched without PDL


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel or operation at a fixed shape; `run(i)` launches it on the i-th of `num_variants` sets of buffers."""

    name: str
    run: Callable[[int], Tensor]
    expected: Callable[[], Tensor]  # result of the first run(0), by the reference
    num_variants: int
    num_bytes: float  # read and written by a launch
    num_flops: float = 0.0
    model: str = "qwen3-4b"  # of these shapes


def variants_for(num_bytes: float) -> int:
    return max(1, min(64, int(ROTATED_BYTES // num_bytes)))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def norm_case(num_tokens: int) -> Case:
    num_bytes = num_tokens * HIDDEN * 4
    weight, xs = random(HIDDEN), random(variants_for(num_bytes), num_tokens, HIDDEN)

    def run(i: int) -> Tensor:
        return rms_norm(xs[i], weight, EPS, pdl=num_tokens <= MAX_STEP_TOKENS)

    def expected() -> Tensor:
        return reference.rms_norm(xs[0], weight, EPS)

    return Case(f"rms_norm {num_tokens}", run, expected, len(xs), num_bytes)


def gate_case(num_tokens: int) -> Case:
    num_bytes = num_tokens * INNER * 6
    gates = random(variants_for(num_bytes), num_tokens, 2 * INNER)

    def expected() -> Tensor:
        return reference.gate_mul(gates[0], Activation.SILU)

    return Case(f"silu_mul {num_tokens}", lambda i: gate_mul(gates[i]), expected, len(gates), num_bytes)


def attention_weights(max_positions: int, head_dim: int = HEAD_DIM) -> AttentionWeights:
    """Make random query and key norms and a rope table."""
    angles = torch.rand(max_positions, head_dim // 2, device="cuda")
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    return AttentionWeights(
        q_norm=random(head_dim),
        k_norm=random(head_dim),
        norm_eps=EPS,
        rope=rope,
        num_q_heads=NUM_Q,
        num_kv_heads=NUM_KV,
        head_dim=head_dim,
        scale=head_dim**-0.5,
    )


def gated_gemm_cases(num_tokens: int) -> Iterator[Case]:
    """Yield the gate and up products of an MLP: fused in a kernel, and as a cuBLAS product followed by the gate."""
    x, weights = random(num_tokens, HIDDEN), random(4, 2 * INNER, HIDDEN) * HIDDEN**-0.5
    num_bytes = 2 * (num_tokens * (HIDDEN + INNER) + 2 * INNER * HIDDEN)
    flops = 4 * num_tokens * INNER * HIDDEN

    def separate(i: int) -> Tensor:
        return gate_mul(x @ weights[i].t())

    def expected() -> Tensor:
        return reference.gate_mul(x.float() @ weights[0].float().t(), Activation.SILU).to(x.dtype)

    yield Case(f"gated_gemm {num_tokens}", lambda i: gated_gemm(x, weights[i]), expected, 4, num_bytes, flops)
    yield Case(f"cuBLAS and silu_mul {num_tokens}", separate, expected, 4, num_bytes, flops)


def rope_case(num_tokens: int) -> Case:
    weights = attention_weights(num_tokens)
    num_bytes = num_tokens * QKV * 4
    qkvs = random(variants_for(num_bytes), num_tokens, QKV)
    pool = random(-(-num_tokens // BLOCK_SIZE), len(qkvs), 2, BLOCK_SIZE, NUM_KV, HEAD_DIM)
    slots = torch.arange(num_tokens, device="cuda")
    positions = slots.int()
    pdl = num_tokens <= MAX_STEP_TOKENS

    def run(i: int) -> Tensor:
        return qk_norm_rope_kv(qkvs[i], weights, positions, slots, pool[:, i, 0], pool[:, i, 1], pdl=pdl)

    def expected() -> Tensor:
        return reference.qk_norm_rope_kv(qkvs[0], weights, positions, slots, pool[:, 0, 0], pool[:, 0, 1])

    return Case(f"qk_norm_rope_kv {num_tokens}", run, expected, len(qkvs), num_bytes)


def paged_batch(
    query_len: int, seq_len: int, num_seqs: int, num_layers: int, num_kv: int = NUM_KV, head_dim: int = HEAD_DIM
) -> tuple[Tensor, ForwardBatch]:
    """Make a pool of scattered blocks, and a batch of sequences of equal length."""
    num_blocks = num_seqs * (seq_len // BLOCK_SIZE)
    pool = random(num_blocks, num_layers, 2, BLOCK_SIZE, num_kv, head_dim)
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    batch = ForwardBatch(
        token_ids=none,
        positions=none,
        slots=(none,),
        block_tables=(torch.randperm(num_blocks, device="cuda").int().view(num_seqs, -1),),
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * query_len,
        last_tokens=None,
        max_query_len=query_len,
        max_seq_len=seq_len,
    )
    return pool, batch


def embedding_case(num_tokens: int) -> Case:
    num_bytes = num_tokens * HIDDEN * 4
    table = random(VOCAB, HIDDEN)
    ids = torch.randint(VOCAB, (variants_for(num_bytes), num_tokens), dtype=torch.int32, device="cuda")

    def expected() -> Tensor:
        return table[ids[0].long()]

    pdl = gpu_of(table.device).has_dependent_launch
    return Case(f"embedding {num_tokens}", lambda i: embedding(ids[i], table, pdl=pdl), expected, len(ids), num_bytes)


def gather_case(num_copies: int) -> Case:
    block_bytes = 36 * BLOCK_SIZE * TOKEN_BYTES
    pools = torch.randint(0, 256, (2, 600, block_bytes), dtype=torch.uint8, device="cuda")
    ids = torch.stack([torch.randperm(600, device="cuda")[:num_copies] for _ in range(2)]).int()

    def run(_: int) -> Tensor:
        gather_blocks(pools[0].data_ptr(), ids[0], pools[1], ids[1])
        return pools[1]

    def expected() -> Tensor:
        target = pools[1].clone()
        reference.gather_blocks(pools[0], ids[0], target, ids[1])
        return target

    return Case(f"gather_blocks {num_copies}", run, expected, 1, 2 * num_copies * block_bytes)


FILTERS = {  # temperature, top_k, top_p, min_p of the rows, in turns
    "greedy": [(0.0, 0, 1.0, 0.0)],
    "draw": [(0.8, 0, 1.0, 0.0)],
    "top": [(0.8, 50, 0.95, 0.0)],
    "top-k": [(0.8, 50, 1.0, 0.0)],
    "nucleus": [(1.0, 0, 0.95, 0.0)],
    "min-p": [(1.0, 0, 1.0, 0.05)],
    "large k": [(1.0, 5000, 1.0, 0.0)],
    "distinct": [(0.3 + i / 50, (0, 20, 50, 1000)[i % 4], 0.8 + i / 400, 0.0) for i in range(64)],
}
SAMPLED = (*((how, "normal") for how in FILTERS), *product(("top", "nucleus", "min-p"), ("peaked", "flat")))


def make_logits(shape: str, *size: int) -> Tensor:
    """Make random logits of a shape.

    - normal: a normal distribution.
    - peaked: few tokens far above the rest, as with most models.
    - flat: more candidates than the sampler's fast path holds.
    """
    match shape:
        case "normal":
            return torch.randn(size, device="cuda") * 3
        case "peaked":
            is_likely = torch.rand(size, device="cuda") < 3e-4
            return torch.randn(size, device="cuda") * 2 + is_likely * (6 + 8 * torch.rand(size, device="cuda"))
        case _:
            return torch.rand(size, device="cuda") / 10


def sampling_case(num_rows: int, how: str, shape: str) -> Case:
    rows = [FILTERS[how][i % len(FILTERS[how])] for i in range(num_rows)]
    num_bytes, device = num_rows * VOCAB * 4, torch.device("cuda")
    logits = make_logits(shape, variants_for(num_bytes), num_rows, VOCAB)
    positions = torch.arange(num_rows, dtype=torch.int32, device=device)
    workspace, pdl = sampling.make_workspace(num_rows, VOCAB, device), gpu_of(device).has_dependent_launch
    wanted = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i) for i, (t, k, p, m) in enumerate(rows)]
    params = sampling_tensors(wanted, device)

    def run(i: int) -> Tensor:
        return sampling.sample(logits[i], params, positions, workspace, pdl=pdl)

    def expected() -> Tensor:
        return reference.sample(logits[0], params, positions)

    name = f"sample {how}" if shape == "normal" else f"sample {how} {shape}"
    return Case(f"{name} {num_rows}", run, expected, len(logits), num_bytes)


def adjust_case(num_rows: int) -> Case:
    device, num_bytes = torch.device("cuda"), num_rows * VOCAB * 12
    wanted = [SamplingParams(frequency_penalty=0.01, presence_penalty=0.01)] * num_rows
    params, adjustments = sampling_tensors(wanted, device), Adjustments(num_rows, VOCAB, device)
    adjustments.fill([SlotFill(row, each, range(row, row + 2000), 1000) for row, each in enumerate(wanted)])
    logits = torch.randn(variants_for(num_bytes), num_rows, VOCAB, device=device)
    before, slots = logits[0].clone(), torch.arange(num_rows, dtype=torch.int32, device=device)
    columns = (params, slots, adjustments.tensors, torch.full_like(slots, -1), slots)  # nothing is counted

    def run(i: int) -> Tensor:
        adjust_logits(logits[i], *columns)
        return logits[i]

    def expected() -> Tensor:
        reference.adjust_logits(before, *columns)
        return before

    return Case(f"adjust_logits {num_rows}", run, expected, len(logits), num_bytes)


def logprobs_case(num_rows: int, num_top: int) -> Case:
    num_bytes = num_rows * VOCAB * 4
    logits = torch.randn(variants_for(num_bytes), num_rows, VOCAB, device="cuda")
    tokens = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    wanted, values = torch.full_like(tokens, num_top + 1), slice(MAX_LOGPROBS + 2, MAX_LOGPROBS + 3 + num_top)

    def run(i: int) -> Tensor:
        return logprobs(logits[i], wanted, tokens)[:, values].view(torch.float32)

    def expected() -> Tensor:
        return reference.logprobs(logits[0], wanted, tokens)[:, values].view(torch.float32)

    return Case(f"logprobs {num_top} {num_rows}", run, expected, len(logits), num_bytes)


def kernel_cases() -> Iterator[Case]:
    """Yield cases lazily, because the buffers of all cases would not fit at once."""
    yield from map(embedding_case, (1, 64))
    yield from map(norm_case, (1, 4, 16, 64, 8192))
    yield from map(gate_case, (64, 8192))
    yield from map(rope_case, (1, 64, 8192))
    if gpu_of(torch.device("cuda")).is_hopper:
        yield from chain.from_iterable(map(gated_gemm_cases, (1024, 2048, 8192)))
    yield from map(gather_case, (64, 512))
    yield from (sampling_case(num_rows, *sampled) for num_rows, sampled in product((1, 8, 64), SAMPLED))
    yield from map(adjust_case, (1, 64))
    yield from starmap(logprobs_case, product((1, 64), (0, 5, 20)))
