"""Attention of prompt steps at Qwen3-4B's shapes: each kernel at its own prompts, and beside another kernel."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.cases.kernel import (
    HEAD_DIM,
    NUM_KV,
    NUM_Q,
    SCALE,
    TOKEN_BYTES,
    Case,
    paged_batch,
    random,
    variants_for,
)
from common.kernels.attention.few_query_attention import few_query_attention
from common.kernels.attention.hopper.long_attention import long_attention
from common.kernels.attention.prefill_attention import prefill_attention
from common.kernels.attention.query_parts import make_query_parts
from common.kernels.base.attention_operands import PromptOperands
from common.kernels.base.gpu import gpu_of
from common.ops import reference
from common.ops.base import ForwardBatch

SHORT_BATCHES = ((1, 16), (1, 128), (8, 16))  # prompts, tokens of each
BATCHES = ((1, 512), (1, 1024), (8, 128), (16, 64), (64, 16))
LONG_BATCHES = ((1, 2048), (1, 8192), (1, 16_000))
FEW_QUERIES = 16  # new tokens of a prompt otherwise cached
NUM_SEEN = (1024, 8192, 16_384, 32_768)  # cached tokens of such a prompt
TAIL = 256  # last queries of a single prompt, checked by the reference

PromptAttention = Callable[[Tensor, Tensor, Tensor, ForwardBatch], Tensor]


def scale_of(q: Tensor) -> float:
    return float(q.shape[2] ** -0.5)


def prompts_of(
    q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, window: int = 0, sinks: Tensor | None = None
) -> PromptOperands:
    """Return operands of prompt attention with the usual scale."""
    return PromptOperands(
        q=q,
        k_cache=k,
        v_cache=v,
        block_tables=batch.block_tables[0],
        cu_seqlens=batch.cu_seqlens,
        seq_lens=batch.seq_lens,
        scale=scale_of(q),
        window=window,
        sinks=sinks,
    )


def paged_attention(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
    return prefill_attention(prompts_of(q, k, v, batch), batch.max_query_len, gpu_of(q.device))


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
    return long_attention(prompts_of(q, k, v, batch), len(q))


def make_divided_attention() -> PromptAttention:
    """Return attention for few queries, with a workspace for all cases."""
    device = torch.device("cuda")
    gpu = gpu_of(device)
    workspace = make_query_parts(NUM_KV, HEAD_DIM, gpu, device)

    def divided_attention(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        return few_query_attention(prompts_of(q, k, v, batch), workspace, gpu)

    return divided_attention


def whole_case(name: str, attend: PromptAttention, num_seqs: int, seq_len: int) -> Case:
    """Make a case of whole prompts.

    For a single prompt the reference checks only the last queries, because the last queries see all keys.
    """
    num_tokens = num_seqs * seq_len
    pool, batch = paged_batch(seq_len, seq_len, num_seqs, variants_for(num_tokens * TOKEN_BYTES))
    q = random(num_tokens, NUM_Q, HEAD_DIM)

    def run(i: int) -> Tensor:
        k, v = pool[:, i].unbind(1)
        return attend(q, k, v, batch)

    def expected() -> Tensor:
        k, v = pool[:, 0].unbind(1)
        if num_seqs > 1 or num_tokens <= TAIL:
            return reference.paged_attention(q, k, v, batch.block_tables[0], batch, SCALE)
        tail = reference.paged_attention(q[-TAIL:], k, v, batch.block_tables[0], tail_of(batch), SCALE)
        return torch.cat((run(0)[:-TAIL], tail))

    flops = num_seqs * 4 * NUM_Q * HEAD_DIM * seq_len * (seq_len + 1) / 2
    num_bytes = num_tokens * (TOKEN_BYTES + NUM_Q * HEAD_DIM * 4)
    shape = f"{seq_len}" if num_seqs == 1 else f"{num_seqs} x {seq_len}"
    return Case(f"{name} {shape}", run, expected, pool.shape[1], num_bytes, flops)


def tail_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch's only sequence with its last queries."""
    bounds = torch.tensor([0, TAIL], dtype=torch.int32, device="cuda")
    return replace(batch, cu_seqlens=bounds, max_query_len=TAIL)


def seen_case(name: str, attend: PromptAttention, num_seqs: int, num_seen: int) -> Case:
    """Make a case of the last tokens of prompts; all earlier tokens are in the pool."""
    seq_len, num_tokens = num_seen + FEW_QUERIES, num_seqs * FEW_QUERIES
    read_bytes = num_seqs * seq_len * TOKEN_BYTES
    pool, batch = paged_batch(FEW_QUERIES, seq_len, num_seqs, variants_for(read_bytes))
    q = random(num_tokens, NUM_Q, HEAD_DIM)

    def run(i: int) -> Tensor:
        k, v = pool[:, i].unbind(1)
        return attend(q, k, v, batch)

    def expected() -> Tensor:
        k, v = pool[:, 0].unbind(1)
        return reference.paged_attention(q, k, v, batch.block_tables[0], batch, SCALE)

    num_bytes = read_bytes + num_tokens * NUM_Q * HEAD_DIM * 4
    flops = 4 * NUM_Q * HEAD_DIM * num_tokens * (num_seen + (FEW_QUERIES + 1) / 2)
    seqs = "" if num_seqs == 1 else f"{num_seqs} x "
    return Case(f"{name} {seqs}{FEW_QUERIES} of {seq_len}", run, expected, pool.shape[1], num_bytes, flops)


def prompt_cases() -> Iterator[Case]:
    """Yield cases lazily, because the buffers of all cases would not fit at once."""
    paged, divided = ("prefill_attention", paged_attention), ("few_query_attention", make_divided_attention())
    for num_seqs, num_seen in product((1, 8), NUM_SEEN):
        yield from (seen_case(*kernel, num_seqs, num_seen) for kernel in (divided, paged))
    for batch in SHORT_BATCHES:
        yield from (whole_case(*kernel, *batch) for kernel in (divided, paged))
    yield from (whole_case(*paged, *batch) for batch in BATCHES)
    if gpu_of(torch.device("cuda")).is_hopper:
        yield from (whole_case("long_attention", gathered_attention, *batch) for batch in (*BATCHES, *LONG_BATCHES))
