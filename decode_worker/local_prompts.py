"""Prompts computed by the decode worker itself, when no prefill worker can.

One at a time and in small chunks between decode steps: the streams that run here slow down, and go on.
"""

from collections import deque

from common.device.prompt_buffers import PromptChunk
from common.device.prompt_runner import PromptRunner
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import Sequence


class LocalPrompts:
    """Waiting prompts, and the one being computed."""

    def __init__(self, runner: PromptRunner, scheduler: Scheduler, chunk_tokens: int) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.current: Sequence | None = None
        self.num_computed_tokens = 0

    def __len__(self) -> int:
        return len(self.waiting) + (self.current is not None)

    def accept(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id or s.attempt > attempt)
        current = self.current
        if current and current.request_id == request_id and current.attempt <= attempt:
            self.scheduler.unreserve(current)
            self.current = None

    def step(self) -> tuple[Sequence, int] | None:
        """Compute one chunk; returns the sequence and its next token when its prompt is complete."""
        if self.current is None and not self._begin():
            return None
        sequence, start = self.current, self.num_computed_tokens
        assert sequence is not None  # _begin saw to it
        token_ids = sequence.token_ids[start : start + self.chunk_tokens]
        is_last = start + len(token_ids) == len(sequence.token_ids)
        [token] = self.runner.run(
            [PromptChunk(token_ids, start, sequence.block_ids, sequence.sampling, is_last=is_last)]
        )
        self.num_computed_tokens += len(token_ids)
        if token is None:
            return None
        self.current = None
        return sequence, token

    def release_all(self) -> list[Sequence]:
        """Give up everything; returns the sequences."""
        sequences = list(self.waiting)
        self.waiting.clear()
        if self.current:
            sequences.append(self.current)
            self.scheduler.unreserve(self.current)
            self.current = None
        return sequences

    def _begin(self) -> bool:
        if not self.waiting or not self.scheduler.has_room(len(self.waiting[0].token_ids)):
            return False
        self.current, self.num_computed_tokens = self.waiting.popleft(), 0
        self.scheduler.reserve(self.current)
        return True
