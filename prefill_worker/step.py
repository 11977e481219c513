"""Launch of scheduled chunks on the prompt runner, without waiting for the device."""

import time
from dataclasses import dataclass

from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PendingPrompts, PromptRunner
from common.device.steps.prompt_scores import PromptScores
from common.wire.values.output_token import OutputToken
from prefill_worker.scheduler import Chunk
from prefill_worker.sequence import PromptSequence


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A launched step and the sequences of its chunks."""

    pending: PendingPrompts
    sequences: list[PromptSequence]
    ends: list[int]  # tokens of each sequence computed after the step
    num_tokens: int  # computed by the step
    launched_s: float

    def ended(self) -> list[tuple[PromptSequence, OutputToken]]:
        """Return live sequences with a complete prompt, each with the first token."""
        pairs = zip(self.sequences, self.pending.tokens(), strict=True)
        return [(sequence, token) for sequence, token in pairs if token is not None and not sequence.ended]

    def scored(self) -> list[tuple[PromptSequence, PromptScores]]:
        """Return live sequences with requested prompt log-probabilities; call after `ended`."""
        pairs = zip(self.sequences, self.pending.scores(), strict=True)
        return [(sequence, scores) for sequence, scores in pairs if scores is not None and not sequence.ended]

    def reached(self) -> list[tuple[PromptSequence, int]]:
        """Return live sequences, each with the number of computed tokens."""
        pairs = zip(self.sequences, self.ends, strict=True)
        return [(sequence, end) for sequence, end in pairs if not sequence.ended]

    def unfinished(self) -> list[tuple[PromptSequence, int]]:
        """Return live sequences with an incomplete prompt, each with the number of computed tokens."""
        return [(sequence, end) for sequence, end in self.reached() if end < len(sequence.token_ids)]


def launch_chunks(runner: PromptRunner, chunks: list[Chunk]) -> PromptStep:
    """Launch a step over the chunks; the step may use the whole GPU if every prompt may."""
    sequences, launched_s = [chunk.sequence for chunk in chunks], time.monotonic()
    prompt_chunks = [_prompt_chunk(chunk) for chunk in chunks]
    pending = runner.launch(prompt_chunks, whole_gpu=all(sequence.whole_gpu for sequence in sequences))
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    return PromptStep(pending, sequences, [chunk.end for chunk in prompt_chunks], num_tokens, launched_s)


def _prompt_chunk(chunk: Chunk) -> PromptChunk:
    sequence, start = chunk.sequence, chunk.sequence.num_scheduled_tokens
    return PromptChunk(
        token_ids=sequence.token_ids[start : start + chunk.num_tokens],
        start=start,
        tables=[table.block_ids for table in sequence.tables],
        sampling=sequence.sampling,
        is_last=chunk.is_last,
        sequence_ids=sequence.token_ids,
        num_outputs=sequence.num_outputs,
        mask=sequence.mask,
        num_prompt_logprobs=sequence.num_prompt_logprobs,
        first_scored=sequence.first_scored,
    )
