"""Attention of models whose layers see a window, have sinks, or have heads of 256: decode steps and prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.cases.decode import decode_batch
from benchmarks.cases.kernel import Case, attention_weights, paged_batch, random, variants_for
from benchmarks.cases.prompt import FEW_QUERIES, TAIL, prompts_of, scale_of, tail_of
from common.kernels.attention.few_query_attention import few_query_attention
from common.kernels.attention.hopper.long_attention import long_attention
from common.kernels.attention.prefill_attention import prefill_attention
from common.kernels.attention.query_parts import make_query_parts
from common.kernels.base.gpu import gpu_of
from common.ops import reference
from common.ops.base import ForwardBatch, GroupCache
from common.ops.cuda_ops import CudaOps
from common.ops.torch_ops import TorchOps
from common.settings.config import KernelsSection

POOL_BYTES = 4 << 30  # of all layers of a case, at most
DECODED = ((1, 8192), (64, 4096))  # sequences, tokens of each
PROMPTS = (2048, 8192)
NUM_SEEN = 8192  # cached tokens of a prompt with few new tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a layer."""

    model: str
    num_q: int
    num_kv: int
    head_dim: int
    window: int = 0  # tokens seen by a token; 0: all
    has_sinks: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token, bf16."""
        return 4 * self.num_kv * self.head_dim

    @property
    def name(self) -> str:
        return f"{self.model} {f'window {self.window}' if self.window else 'full'}"

    def sinks(self) -> Tensor | None:
        return torch.randn(self.num_q, device="cuda") if self.has_sinks else None

    def num_variants(self, num_bytes: int, pool_tokens: int) -> int:
        """Return the layers to rotate over, for a launch that reads `num_bytes`."""
        return max(1, min(variants_for(num_bytes), POOL_BYTES // (pool_tokens * self.token_bytes)))


SHAPES = (
    Shape("gpt-oss", 64, 8, 64, 128, has_sinks=True),
    Shape("gpt-oss", 64, 8, 64, has_sinks=True),
    Shape("gemma-3-4b", 8, 4, 256, 1024),
    Shape("gemma-3-4b", 8, 4, 256),
    Shape("mistral-7b-v0.1", 32, 8, 128, 4096),
)

PromptAttention = Callable[[Shape, Tensor, Tensor, Tensor, ForwardBatch, Tensor | None], Tensor]


def decode_case(shape: Shape, num_seqs: int, seq_len: int) -> Case:
    """Make a case of all work between two products of a decode step, as `decode_cases.attention_case`."""
    num_seen = min(seq_len, shape.window or seq_len)
    num_heads = 2 * shape.num_q + 2 * shape.num_kv  # of QKV and the output
    num_bytes = num_seqs * (num_seen * shape.token_bytes + num_heads * shape.head_dim * 2)
    num_layers = shape.num_variants(num_bytes, num_seqs * seq_len)
    pool, batch = decode_batch(num_seqs, seq_len, num_layers, shape.num_kv, shape.head_dim)
    cache, pdl = GroupCache(pool, shape.num_q, shape.window), gpu_of(pool.device).has_dependent_launch
    ops = CudaOps([cache], KernelsSection(), num_seqs, pdl=pdl)
    weights = replace(
        attention_weights(seq_len, shape.head_dim),
        num_q_heads=shape.num_q,
        num_kv_heads=shape.num_kv,
        window=shape.window,
        sinks=shape.sinks(),
    )
    qkv = random(num_seqs, weights.num_heads * shape.head_dim)
    batch = ops.begin(batch)

    def run(i: int) -> Tensor:
        return ops.attention(qkv, weights, i, batch)

    def expected() -> Tensor:
        return TorchOps([cache]).attention(qkv, weights, 0, batch)

    name = f"decode attention {shape.name} {num_seqs} x {seq_len}"
    return Case(name, run, expected, num_layers, num_bytes, model=shape.model)


def in_place(shape: Shape, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, sinks: Tensor | None) -> Tensor:
    return prefill_attention(prompts_of(q, k, v, batch, shape.window, sinks), batch.max_query_len, gpu_of(q.device))


def gathered(shape: Shape, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, sinks: Tensor | None) -> Tensor:
    return long_attention(prompts_of(q, k, v, batch, shape.window, sinks), batch.max_seq_len)


def make_divided(shape: Shape) -> PromptAttention:
    """Return attention of few queries, with its workspace."""
    device = torch.device("cuda")
    gpu = gpu_of(device)
    workspace = make_query_parts(shape.num_kv, shape.head_dim, gpu, device)

    def divided(shape: Shape, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, sinks: Tensor | None) -> Tensor:
        return few_query_attention(prompts_of(q, k, v, batch, shape.window, sinks), workspace, gpu)

    return divided


def prompt_case(kernel: str, attend: PromptAttention, shape: Shape, num_tokens: int, seq_len: int) -> Case:
    """Make a case of the last tokens of a prompt; the reference checks at most `TAIL` of them."""
    window, sinks = shape.window or seq_len, shape.sinks()
    positions = torch.arange(seq_len - num_tokens, seq_len)
    num_pairs = int((positions + 1).clamp(max=window).sum())
    num_read = min(seq_len, num_tokens + window)
    num_bytes = num_read * shape.token_bytes + num_tokens * shape.num_q * shape.head_dim * 4
    num_layers = shape.num_variants(num_bytes, seq_len)
    pool, batch = paged_batch(num_tokens, seq_len, 1, num_layers, shape.num_kv, shape.head_dim)
    q = random(num_tokens, shape.num_q, shape.head_dim)

    def run(i: int) -> Tensor:
        k, v = pool[:, i].unbind(1)
        return attend(shape, q, k, v, batch, sinks)

    def expected() -> Tensor:
        k, v = pool[:, 0].unbind(1)
        checked = batch if num_tokens <= TAIL else tail_of(batch)
        last, table = q[-checked.max_query_len :], batch.block_tables[0]
        law = reference.paged_attention(last, k, v, table, checked, scale_of(q), shape.window, sinks)
        return torch.cat((run(0)[: -len(law)], law))

    flops = 4.0 * shape.num_q * shape.head_dim * num_pairs
    tokens = f"{num_tokens}" if num_tokens == seq_len else f"{num_tokens} of {seq_len}"
    return Case(f"{kernel} {shape.name} {tokens}", run, expected, num_layers, num_bytes, flops, model=shape.model)


def attention_cases() -> Iterator[Case]:
    """Yield cases lazily, because the buffers of all cases would not fit at once."""
    is_hopper = gpu_of(torch.device("cuda")).is_hopper
    for shape in SHAPES:
        yield from (decode_case(shape, *sizes) for sizes in DECODED)
        divided = make_divided(shape)
        yield prompt_case("few_query_attention", divided, shape, FEW_QUERIES, NUM_SEEN + FEW_QUERIES)
        kernels = (("prefill_attention", in_place), ("long_attention", gathered))[: 2 if is_hopper else 1]
        for num_tokens, kernel in product(PROMPTS, kernels):
            yield prompt_case(*kernel, shape, num_tokens, num_tokens)
            yield prompt_case(*kernel, shape, num_tokens, num_tokens + NUM_SEEN)
