"""Transfer of sampled tokens to the host, so a step can be launched without waiting for the step before.

Tokens travel through pinned memory in either of two ways. `Landing` copies tokens in stream order, before the next step
or graph replay may overwrite them. With `RingLanding`, the step stores tokens into a ring itself, so the next step
waits for no copy.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.kernels.base.sampling_operands import LOGPROB_WORDS, LogprobRing, TokenRing
from common.wire.values.output_token import MAX_LOGPROBS, Logprobs, OutputToken, plain_token


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens chosen for each row, in order: at least a token, or NO_CHOICE alone."""

    rows: list[list[OutputToken]]

    @staticmethod
    def of_one_each(token_ids: Iterable[int]) -> "StepOutput":
        """Build an output with a plain token for each row."""
        return StepOutput([[plain_token(token_id)] for token_id in token_ids])

    @staticmethod
    def with_logprobs(token_ids: Iterable[int], words: np.ndarray) -> "StepOutput":
        """Build an output with a token and log-probabilities for each row: `words [num_rows, LOGPROB_WORDS]` int32."""
        logprobs = map(_logprobs_of, words.tolist(), words.view(np.float32).tolist())
        return StepOutput([[OutputToken(*pair)] for pair in zip(token_ids, logprobs, strict=True)])

    def token_ids(self) -> list[list[int]]:
        return [[token.token_id for token in row] for row in self.rows]


def _logprobs_of(words: list[int], values: list[float]) -> Logprobs | None:
    """Decode a row given as int32 and as float32: number of entries, then ids, then values."""
    num, first_value = words[0], 2 + MAX_LOGPROBS
    return Logprobs(tuple(words[1 : 1 + num]), tuple(values[first_value : first_value + num])) if num else None


NUM_SLOTS = 3
"""A step runs, a step is queued, a step is being read."""
LOOK_INTERVAL_S = 50e-6
"""Sleep between two polls for a finished step: short beside a step, long beside a poll."""
NO_TOKEN = -1


class PendingOutput:
    """Output of a launched step, to be read once.

    Args:
        read: returns the tokens of each row, or NO_CHOICE, after the step.
        event: recorded after the step; None for a finished step.
        num_run: rows of the step, padding included.
    """

    def __init__(self, read: Callable[[], StepOutput], event: "torch.cuda.Event | None", num_run: int) -> None:
        self.read, self.event, self.num_run = read, event, num_run

    def ready(self) -> bool:
        """Tell whether the step is over, with tokens on the host and all writes done."""
        return self.event is None or bool(self.event.query())

    def output(self) -> StepOutput:
        """Return the tokens of each row; waits for the step."""
        if self.event is not None:
            self.event.synchronize()
        return self.read()


class Landing:
    """Pinned memory for the outputs of `NUM_SLOTS` steps of up to `max_rows` rows, used in turn."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        shape = (max_rows, 1 + LOGPROB_WORDS)
        self.slots = deque(torch.zeros(shape, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(NUM_SLOTS))

    def fetch(self, sampled: Tensor, logprobs: Tensor | None = None) -> PendingOutput:
        """Start copying `sampled [num_rows]` int32, and words of log-probabilities if any.

        At most `NUM_SLOTS` outputs may be unread at once.
        """
        num_rows = sampled.shape[0]
        slot = self.slots[0].view(-1)[: self.slots[0].shape[1] * num_rows]
        self.slots.rotate(-1)
        tokens, words = slot[:num_rows], slot[num_rows:].view(num_rows, LOGPROB_WORDS)
        tokens.copy_(sampled, non_blocking=True)
        if logprobs is not None:
            words.copy_(logprobs, non_blocking=True)

        def read() -> StepOutput:
            token_ids = tokens.tolist()
            if logprobs is None:
                return StepOutput.of_one_each(token_ids)
            return StepOutput.with_logprobs(token_ids, words.numpy())

        return PendingOutput(read, _recorded_event() if self.is_cuda else None, num_rows)


class RingLanding:
    """Host side of a ring for decode steps of up to `max_rows` rows.

    A captured step has fixed arguments, so the device itself keeps the next slot of each row. A step advances the turns
    of its rows; the host knows the rows and advances its own copy.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.ring = make_ring(max_rows, device)
        self.logprob_ring = make_logprob_ring(self.ring)
        self._tokens = self.ring.tokens_cpu.numpy()
        self._words = self.logprob_ring.words_cpu.numpy()
        self._rows = np.arange(max_rows)
        self._turns = np.zeros(max_rows, np.int64)

    def launched(self, num_rows: int, num_run: int, *, has_logprobs: bool = False) -> PendingOutput:
        """Return the output of the first `num_rows` rows of the step just launched over `num_run` rows.

        Must be called after every step that runs; at most `NUM_SLOTS` outputs may be unread at once.
        """
        turns = self._turns[:num_rows].copy()
        self._turns[:num_run] = (self._turns[:num_run] + 1) % NUM_SLOTS
        read = partial(self._take, turns, has_logprobs)
        return PendingOutput(read, _recorded_event() if self.is_cuda else None, num_run)

    def _take(self, turns: np.ndarray, has_logprobs: bool) -> StepOutput:
        places = self._rows[: len(turns)], turns
        tokens: list[int] = self._tokens[places].tolist()
        assert NO_TOKEN not in tokens, "host and device disagree about whose turn it is"
        self._tokens[places] = NO_TOKEN
        return StepOutput.with_logprobs(tokens, self._words[places]) if has_logprobs else StepOutput.of_one_each(tokens)


def make_ring(max_rows: int, device: torch.device) -> TokenRing:
    """Make a ring without tokens."""
    shape, is_cuda = (max_rows, NUM_SLOTS), device.type == "cuda"
    return TokenRing(
        tokens_cpu=torch.full(shape, NO_TOKEN, dtype=torch.int32, pin_memory=is_cuda),
        turns=torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


def make_logprob_ring(ring: TokenRing) -> LogprobRing:
    """Make the ring of log-probabilities beside a token ring, with common turns."""
    shape = (*ring.tokens_cpu.shape, LOGPROB_WORDS)
    words_cpu = torch.zeros(shape, dtype=torch.int32, pin_memory=ring.tokens_cpu.is_pinned())
    return LogprobRing(words_cpu, ring.turns)


def _recorded_event() -> "torch.cuda.Event":
    event = torch.cuda.Event()
    event.record()
    return event
