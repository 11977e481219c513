"""Sampled tokens on their way to the host, so that a step can be launched without waiting for the one before it.

They come through pinned memory in either of two ways. `Landing` copies them in stream order: what a step
sampled is on its way before the next step, or the next replay of the same graph, may overwrite it. Into
the ring of a `RingLanding` the step stores them itself, so that the next one waits for no copy.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.device.steps.step_output import StepOutput
from common.kernels.base.operands import LOGPROB_WORDS, LogprobRing, TokenRing

NUM_SLOTS = 3
"""One step runs, one is queued, one is being read."""
LOOK_INTERVAL_S = 50e-6
"""A loop's sleep between two looks at whether a step is over: short beside a step, long beside a look."""
NO_TOKEN = -1


class PendingOutput:
    """What one launched step yields, to be read once.

    Args:
        read: the tokens of each row, or NO_CHOICE, when the step is over.
        event: recorded after the step; None if it is over.
    """

    def __init__(self, read: Callable[[], StepOutput], event: "torch.cuda.Event | None") -> None:
        self.read = read
        self.event = event

    def ready(self) -> bool:
        """Whether the step is over: its tokens are here and all it wrote is written."""
        return self.event is None or bool(self.event.query())

    def output(self) -> StepOutput:
        """The tokens of each row; waits for the step."""
        if self.event is not None:
            self.event.synchronize()
        return self.read()


class Landing:
    """Pinned memory for what `NUM_SLOTS` steps of up to `max_rows` rows yield, used in turn."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        shape = (max_rows, 1 + LOGPROB_WORDS)
        self.slots = deque(torch.zeros(shape, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(NUM_SLOTS))

    def fetch(self, sampled: Tensor, logprobs: Tensor | None = None) -> PendingOutput:
        """Start copying `sampled [num_rows]` int32, and the words of their log-probabilities if there are any.

        At most `NUM_SLOTS` may be unread at once.
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

        return PendingOutput(read, _recorded_event() if self.is_cuda else None)


class RingLanding:
    """The host's side of a ring for decode steps of up to `max_rows` rows.

    A captured step has the same arguments at each replay, so the device itself keeps which slot of a row comes
    next. A step moves the turns of its own rows on, and as the host knows which those are, it does the same.
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
        """What the first `num_rows` rows of the step just launched yield, which runs over `num_run`.

        To be called after every step that runs; at most `NUM_SLOTS` may be unread at once.
        """
        turns = self._turns[:num_rows].copy()
        self._turns[:num_run] = (self._turns[:num_run] + 1) % NUM_SLOTS
        read = partial(self._take, turns, has_logprobs)
        return PendingOutput(read, _recorded_event() if self.is_cuda else None)

    def _take(self, turns: np.ndarray, has_logprobs: bool) -> StepOutput:
        places = self._rows[: len(turns)], turns
        tokens: list[int] = self._tokens[places].tolist()
        assert NO_TOKEN not in tokens, "host and device disagree about whose turn it is"
        self._tokens[places] = NO_TOKEN
        return StepOutput.with_logprobs(tokens, self._words[places]) if has_logprobs else StepOutput.of_one_each(tokens)


def make_ring(max_rows: int, device: torch.device) -> TokenRing:
    """A ring without tokens."""
    shape, is_cuda = (max_rows, NUM_SLOTS), device.type == "cuda"
    return TokenRing(
        tokens_cpu=torch.full(shape, NO_TOKEN, dtype=torch.int32, pin_memory=is_cuda),
        turns=torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


def make_logprob_ring(ring: TokenRing) -> LogprobRing:
    """The one beside it."""
    shape = (*ring.tokens_cpu.shape, LOGPROB_WORDS)
    words_cpu = torch.zeros(shape, dtype=torch.int32, pin_memory=ring.tokens_cpu.is_pinned())
    return LogprobRing(words_cpu, ring.turns)


def _recorded_event() -> "torch.cuda.Event":
    event = torch.cuda.Event()
    event.record()
    return event
