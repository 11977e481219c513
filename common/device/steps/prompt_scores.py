"""Log-probabilities of prompt tokens, computed by a prompt step beside its sampled token.

The logits of all tokens of a step would take gigabytes. So logits are computed for a few tokens at a time, from the
output of the last layer, and only the requested numbers are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.engine.engine import Engine
from common.device.steps.prompt_buffers import PromptChunk
from common.kernels.base.sampling_operands import LOGPROB_WORDS
from common.ops.base import Residual
from common.wire.messages.worker import PromptLogprobs
from common.wire.values.output_token import MAX_LOGPROBS

SLICE_ROWS = 128
"""Tokens whose logits exist at once."""
MESSAGE_TOKENS = 2048
"""Most tokens in a message, for at most 0.4 MB."""
RANK = LOGPROB_WORDS
"""Column of the rank, behind the words of log-probabilities."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a sequence's tokens from `first_position` on."""

    first_position: int
    words: np.ndarray  # [num_tokens, LOGPROB_WORDS + 1] int32: words of `reference.logprobs`, then the rank

    def messages(self, worker_id: str, epoch: int, request_id: str, attempt: int) -> Iterator[PromptLogprobs]:
        """Yield messages to the router, in order of positions."""
        for begin in range(0, len(self.words), MESSAGE_TOKENS):
            words = self.words[begin : begin + MESSAGE_TOKENS]
            is_entry = np.arange(MAX_LOGPROBS + 1) < words[:, :1]
            yield PromptLogprobs(
                worker_id=worker_id,
                epoch=epoch,
                request_id=request_id,
                attempt=attempt,
                first_position=self.first_position + begin,
                ranks=words[:, RANK].tobytes(),
                num_logprobs=words[:, 0].tobytes(),
                logprob_ids=words[:, 1 : MAX_LOGPROBS + 2][is_entry].tobytes(),
                logprobs=words[:, MAX_LOGPROBS + 2 : RANK][is_entry].tobytes(),
            )


class PromptScorer:
    """Selection and scoring of a step's tokens whose next token needs log-probabilities."""

    def __init__(self, chunks: Sequence[PromptChunk], engine: Engine) -> None:
        self._chunks = chunks
        self._engine = engine
        begins = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])
        rows, tokens, num_wanted = [], [], []
        for begin, chunk in zip(begins.tolist(), chunks, strict=False):
            scored = chunk.scored
            rows.append(np.arange(len(scored)) + begin + scored.start - 1 - chunk.start)
            tokens.append(np.asarray([chunk.sequence_ids[position] for position in scored], np.int64))
            num_wanted.append(np.full(len(scored), chunk.num_prompt_logprobs, np.int64))
        self._rows = self._uploaded(rows, torch.int64)
        self._tokens = self._uploaded(tokens, torch.int32)
        self._num_wanted = self._uploaded(num_wanted, torch.int32)
        shape = (len(self._rows), LOGPROB_WORDS + 1)
        self._words_cpu = torch.empty(shape, dtype=torch.int32, pin_memory=engine.device.type == "cuda")

    def score(self, x: Residual) -> None:
        """Launch the scoring of a step's tokens; the host has the results when the step is over."""
        for begin in range(0, len(self._rows), SLICE_ROWS):
            part = slice(begin, begin + SLICE_ROWS)
            logits = self._engine.model.logits(x.of(self._rows[part]), self._engine.ops)
            tokens = self._tokens[part]
            words = self._engine.sampler.logprobs(logits, self._num_wanted[part], tokens)
            own = logits.gather(1, tokens.long()[:, None])
            ranks = (logits > own).sum(dim=1, keepdim=True, dtype=torch.int32) + 1
            self._words_cpu[part].copy_(torch.cat((words, ranks), dim=1), non_blocking=True)

    def scores(self) -> list[PromptScores | None]:
        """Return the scores of each chunk, None for a chunk without any; call after the step is over."""
        words, begin = self._words_cpu.numpy(), 0
        found: list[PromptScores | None] = []
        for chunk in self._chunks:
            end = begin + len(chunk.scored)
            found.append(PromptScores(chunk.scored.start, words[begin:end]) if end > begin else None)
            begin = end
        return found

    def _uploaded(self, parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        values = torch.from_numpy(np.concatenate(parts)).to(dtype)
        if self._engine.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._engine.device, non_blocking=True)
