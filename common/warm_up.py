"""Gets kernels ready before a worker registers, so that no request pays for a kernel's first use.

Compiling is what a first start spends its time on, and every kernel can be compiled without the
others: `compile_kernels` runs each operation of one layer at each size class in a thread of its own.
What they compute is thrown away. Later starts find the kernels on disk.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from common.engine import Engine
from common.ops.base import ForwardBatch, Ops, Residual, SamplingTensors
from common.prompt_buffers import PromptChunk
from common.prompt_runner import PromptRunner
from common.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_THREADS = 16
PROMPT_LENGTHS = (1, 20, 40, 100, 600, 1100)  # tokens; one for each class that kernels and plans tell apart
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def compile_kernels(engine: Engine, ops: Ops, counts: Sequence[int], *, is_decode: bool) -> None:
    """Compile every operation for each count of tokens: rows of a decode step, or tokens of one prompt."""
    begin_s = time.monotonic()
    tasks = [task for count in counts for task in _operations(engine, ops, count, is_decode)]
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(_run, engine.device, task) for task in tasks]:
            future.result()
    torch.cuda.synchronize(engine.device)
    logger.info("%s kernels ready in %.1f s", "decode" if is_decode else "prompt", time.monotonic() - begin_s)


def warm_up_prompts(runner: PromptRunner) -> None:
    """The longest prompt of a step and a batch of two, sampled by every filter: cuBLAS and memory are ready too.

    Both belong to a stream, so each stream that steps may run on has its turn.
    """
    engine = runner.engine
    longest = min(runner.buffers.max_tokens, engine.max_len, engine.allocator.capacity * engine.pool.layout.block_size)
    for whole_gpu in (True,) if runner.share.limited is None else (True, False):
        _run_prompts(runner, [longest], whole_gpu)
        if longest >= 4 and runner.buffers.max_seqs > 1:
            _run_prompts(runner, [longest // 2, longest // 2 - 1], whole_gpu)


def _run(device: torch.device, task: Callable[[], object]) -> None:
    torch.cuda.set_device(device)
    with torch.inference_mode():
        task()


def _operations(engine: Engine, ops: Ops, count: int, is_decode: bool) -> list[Callable[[], object]]:
    """One layer's operations on `count` tokens of padding, each on its own operands."""
    model, layer, eps = engine.model, engine.model.layers[0], engine.model.config.norm_eps
    num_logits = count if is_decode else 1
    batch = _padding(engine, count, num_logits)
    params = _sampling(num_logits, engine.device)

    def zeros(width: int, rows: int = count) -> torch.Tensor:
        return torch.zeros((rows, width), dtype=model.embed.dtype, device=engine.device)

    def sample() -> None:
        logits = torch.zeros((num_logits, model.lm_head.shape[0]), device=engine.device)
        if is_decode:
            engine.sampler.sample_and_advance(logits, params, batch)
        else:
            engine.sampler.sample(logits, params, batch.seq_lens)

    hidden, inner = model.embed.shape[1], layer.down.shape[1]
    return [
        lambda: ops.norm_linear(Residual(zeros(hidden)), layer.attention_norm, eps, layer.qkv),
        lambda: ops.attention(zeros(layer.qkv.shape[0]), layer.attention, 0, batch),
        lambda: ops.linear_add(zeros(layer.o.shape[1]), layer.o, Residual(zeros(hidden))),
        lambda: ops.norm_gate_up(Residual(zeros(hidden)), layer.mlp_norm, eps, layer.gate_up),
        lambda: ops.linear_add(zeros(inner), layer.down, Residual(zeros(hidden))),
        lambda: ops.logits(Residual(zeros(hidden)), model.norm, eps, model.lm_head, batch),
        sample,
    ]


def _padding(engine: Engine, num_tokens: int, num_seqs: int) -> ForwardBatch:
    device = engine.device
    max_blocks = engine.pool.layout.num_blocks_for(engine.max_len)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        slot_mapping=torch.full((num_tokens,), -1, device=device),
        block_tables=zeros(num_seqs, max_blocks),
        seq_lens=zeros(num_seqs),
        cu_seqlens=zeros(num_seqs + 1),
        logit_rows=None if num_tokens == num_seqs else zeros(num_seqs, dtype=torch.int64),
        max_query_len=num_tokens // num_seqs,
        max_seq_len=engine.max_len,
        num_keys=num_tokens if num_tokens > num_seqs else 0,
    )


def _sampling(rows: int, device: torch.device) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.zeros(rows, device=device),
        top_k=torch.zeros(rows, dtype=torch.int32, device=device),
        top_p=torch.ones(rows, device=device),
        min_p=torch.zeros(rows, device=device),
        seed=torch.zeros(rows, dtype=torch.int64, device=device),
    )


def _run_prompts(runner: PromptRunner, lengths: list[int], whole_gpu: bool) -> None:
    layout, allocator = runner.engine.pool.layout, runner.engine.allocator
    filtered = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    chunks = [
        PromptChunk([0] * length, 0, allocator.allocate(layout.num_blocks_for(length)), filtered, is_last=True)
        for length in lengths
    ]
    runner.run(chunks, whole_gpu=whole_gpu)
    for chunk in chunks:
        allocator.free(chunk.block_ids)
