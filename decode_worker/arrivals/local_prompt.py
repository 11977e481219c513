"""A prompt computed by the decode worker."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from common.device.steps.prompt_buffers import PromptChunk
from common.kv.tables import Tables
from common.serving.prompts.prefixes import Beginning
from decode_worker.sequences.sequence import DecodeSequence, Key


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """A prompt to be computed here."""

    sequence: DecodeSequence
    turn: int
    most_tokens: int = 0  # more to compute: give the prompt back; 0: no limit
    num_prompt_logprobs: int = 0  # per prompt token
    first_scored: int = 0  # first prompt position with log-probabilities
    is_started: bool = False  # has blocks and a reserved row
    num_scheduled_tokens: int = 0  # cached, or computed by launched chunks
    beginning: Beginning = field(default_factory=Beginning)

    @property
    def key(self) -> Key:
        return self.sequence.key

    @property
    def priority(self) -> int:
        """Priority; lower is earlier."""
        return self.sequence.priority

    @property
    def token_ids(self) -> MutableSequence[int]:
        """Prompt and, on a replay, the outputs so far."""
        return self.sequence.token_ids

    @property
    def has_blocks(self) -> bool:
        """True once the blocks are granted."""
        return self.beginning.grant is not None

    @property
    def num_slots(self) -> int:
        """Tokens with a place in the prompt's blocks."""
        return self.sequence.num_prompt_slots

    @property
    def tables(self) -> Tables:
        return self.sequence.tables

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_scheduled_tokens

    def take(self, num_tokens: int) -> PromptChunk:
        """Return the next tokens as a chunk to launch, and count these tokens as scheduled."""
        sequence, start = self.sequence, self.num_scheduled_tokens
        self.num_scheduled_tokens += num_tokens
        token_ids = sequence.token_ids[start : self.num_scheduled_tokens]
        for table in sequence.tables:
            table.extend(start + 1, self.num_scheduled_tokens)
        return PromptChunk(
            token_ids=token_ids,
            start=start,
            tables=[table.block_ids for table in sequence.tables],
            sampling=sequence.sampling,
            is_last=not self.num_left,
            sequence_ids=sequence.token_ids,
            num_outputs=sequence.num_outputs,
            mask=sequence.mask,
            num_prompt_logprobs=self.num_prompt_logprobs,
            first_scored=self.first_scored,
        )
