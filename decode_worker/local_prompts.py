"""Prompts computed by the decode worker itself, when no prefill worker can.

One at a time and in small chunks between decode steps: the streams that run here slow down, and go on. A
chunk is launched and not waited for, so the tokens of steps before it are sent meanwhile.
"""

from collections import deque

from common.device.prompt_buffers import PromptChunk
from common.device.prompt_runner import PendingPrompts, PromptRunner
from decode_worker.scheduler import Scheduler
from decode_worker.sequence import Key, Sequence


class LocalPrompts:
    """Waiting prompts, and the one being computed."""

    def __init__(self, runner: PromptRunner, scheduler: Scheduler, chunk_tokens: int) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.current: Sequence | None = None
        self.num_launched_tokens = 0  # of the current prompt
        self.in_flight: PendingPrompts | None = None

    def __len__(self) -> int:
        return len(self.waiting) + (self.current is not None)

    def has(self, key: Key) -> bool:
        """Whether a prompt waits; the one being computed is the scheduler's."""
        return any(sequence.key == key for sequence in self.waiting)

    def accept(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget every attempt up to `attempt`."""
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id or s.attempt > attempt)
        current = self.current
        if current and current.request_id == request_id and current.attempt <= attempt:
            self._drop_current()

    def drop_all(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self._drop_current()

    def has_chunk(self) -> bool:
        """Whether a chunk can be launched now: none is in flight, and there is a prompt to go on with or to begin."""
        return self.in_flight is None and (self.current is not None or self._begin())

    def launch(self) -> None:
        """Start the chunk that there is."""
        sequence, start = self.current, self.num_launched_tokens
        assert sequence is not None and self.in_flight is None, "has_chunk is asked first"
        token_ids = sequence.token_ids[start : start + self.chunk_tokens]
        self.num_launched_tokens += len(token_ids)
        is_last = self.num_launched_tokens == len(sequence.token_ids)
        chunk = PromptChunk(token_ids, start, sequence.block_ids, sequence.sampling, is_last=is_last)
        self.in_flight = self.runner.launch([chunk])

    def finish(self) -> tuple[Sequence, int] | None:
        """A sequence whose prompt is complete and its next token, if the chunk in flight is over and was its last."""
        sequence = self.current
        if sequence is None or self.in_flight is None or not self.in_flight.ready():
            return None
        [token] = self.in_flight.tokens()
        self.in_flight = None
        if sequence.ended:
            self._drop_current()
        if sequence.ended or token is None:
            return None
        self.current = None
        return sequence, token

    def _drop_current(self) -> None:
        """Free its blocks, or have that done when the chunk that writes them is over."""
        if self.current is None:
            return
        self.current.ended = True
        if self.in_flight is None:
            self.scheduler.unreserve(self.current)
            self.current = None

    def _begin(self) -> bool:
        if not self.waiting or not self.scheduler.has_room(len(self.waiting[0].token_ids)):
            return False
        self.current, self.num_launched_tokens = self.waiting.popleft(), 0
        self.scheduler.reserve(self.current)
        return True
