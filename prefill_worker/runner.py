"""Scheduled chunks -> the prompt runner -> the token sampled after each finished prompt."""

from common.prompt_buffers import PromptChunk
from common.prompt_runner import PromptRunner
from prefill_worker.scheduler import Chunk


def run_chunks(runner: PromptRunner, chunks: list[Chunk]) -> list[int | None]:
    """The first token of each chunk that ends its prompt, None for the others; all KV is written."""
    return runner.run([_prompt_chunk(chunk) for chunk in chunks])


def _prompt_chunk(chunk: Chunk) -> PromptChunk:
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    return PromptChunk(
        token_ids=sequence.token_ids[start : start + chunk.num_tokens],
        start=start,
        block_ids=sequence.block_ids,
        sampling=sequence.sampling,
        is_last=chunk.is_last,
    )
