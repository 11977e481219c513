"""Runs throw-away prompts before the worker registers, so that no request pays for a kernel's first use."""

import logging
import time

from common.prompt_buffers import PromptChunk
from common.prompt_runner import PromptRunner
from common.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

LENGTHS = (1, 20, 100, 600)
"""Tokens; one for each shape class that kernels and cuBLAS tell apart."""


def warm_up_prompts(runner: PromptRunner) -> None:
    """One prompt of each length up to a whole step, and a batch of two, sampled by every filter."""
    engine, begin_s = runner.engine, time.monotonic()
    longest = min(runner.buffers.max_tokens, engine.max_len, engine.allocator.capacity * engine.pool.layout.block_size)
    for length in (*(n for n in LENGTHS if n < longest), longest):
        _run(runner, [length])
    if longest >= 2 * LENGTHS[1] and runner.buffers.max_seqs > 1:
        _run(runner, [LENGTHS[1], LENGTHS[1] - 1])
    logger.info("prompt kernels ready in %.1f s", time.monotonic() - begin_s)


def _run(runner: PromptRunner, lengths: list[int]) -> None:
    layout, allocator = runner.engine.pool.layout, runner.engine.allocator
    filtered = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    chunks = [
        PromptChunk([0] * length, 0, allocator.allocate(layout.num_blocks_for(length)), filtered, is_last=True)
        for length in lengths
    ]
    runner.run(chunks)
    for chunk in chunks:
        allocator.free(chunk.block_ids)
