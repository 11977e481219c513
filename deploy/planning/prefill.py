"""A simulated prefill worker: steps in the workers' own order, one running and one launched behind it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.serving.prompt_order import PromptOrder
from deploy.planning.costs import Costs
from deploy.planning.events import Events
from deploy.planning.gpu import Gpu
from deploy.planning.request import Request

MAX_SEQS, MAX_MIXED_TOKENS = 64, 4096
"""Of a step, as `prefill.max_num_seqs` and `prefill.max_mixed_tokens`."""
DECODE_RESERVE = 0.05
"""Of a pool, left by prompts to whoever decodes there."""
MAX_LAUNCHED = 2
"""Steps: one runs, one follows it."""


@dataclass(slots=True)
class _Step:
    """One that is launched."""

    pieces: list[tuple[Request, bool]]  # prompts, and whether the step completes them
    alone_ms: float  # with its share of the GPU, and nobody beside it
    has_whole: bool
    left_ms: float = field(init=False)

    def __post_init__(self) -> None:
        self.left_ms = self.alone_ms


class PrefillWorker:
    """Computes prompts; what `router` counts of it stands here, too.

    Args:
        on_first: is told of each prompt that is complete.
    """

    def __init__(self, gpu: Gpu, costs: Costs, events: Events, on_first: Callable[[Request], None]) -> None:
        self.gpu, self.costs, self.events, self._on_first = gpu, costs, events, on_first
        self.outstanding_tokens = self.num_outstanding = self.last_turn = 0
        self.overtaking: list[int] = []  # lengths of prompts sent ahead of their turn, ascending
        self._order = PromptOrder(costs.step_tokens, MAX_SEQS, MAX_MIXED_TOKENS)
        self._waiting: list[Request] = []  # tokens left to launch
        self._launched: deque[_Step] = deque()
        self._since_ms, self._speed, self._version = 0.0, 1.0, 0
        gpu.prefill = self

    def take(self, request: Request) -> None:
        """A prompt has come."""
        self._waiting.append(request)
        self.resume()

    def resume(self) -> None:
        """Fill steps, as far as there are prompts with room for them and places in the pipeline."""
        while self._waiting and len(self._launched) < MAX_LAUNCHED:
            pieces = self._order.next_step(self._waiting, self._admit)
            if not pieces:
                return
            self._launched.append(self._step(pieces))
            self._waiting = [request for request in self._waiting if request.num_left]
            if len(self._launched) == 1:
                self._begin()

    def settle(self) -> None:
        """See `Running`."""
        if self._launched:
            self._launched[0].left_ms -= (self.events.now_ms - self._since_ms) * self._speed
            self._since_ms = self.events.now_ms

    def hasten(self) -> None:
        """See `Running`."""
        if self._launched:
            self._speed = self.gpu.prompt_speed
            self._version += 1
            version = self._version
            end_ms = self.events.now_ms + max(0.0, self._launched[0].left_ms) / self._speed
            self.events.at(end_ms, lambda: self._end(version))

    def _admit(self, request: Request) -> bool:
        """Give it KV blocks, if there are so many beside the reserve of decode workers."""
        num_tokens = self.gpu.held_by(request)
        if num_tokens > self.gpu.free_tokens - DECODE_RESERVE * self.gpu.num_tokens:
            return False
        self.gpu.free_tokens -= num_tokens
        request.is_started = True
        return True

    def _step(self, pieces: list[tuple[Request, int]]) -> _Step:
        has_whole = not self.gpu.is_shared or all(request.whole_gpu for request, _ in pieces)
        costs = self.costs.whole if has_whole else self.costs.part
        alone_ms = costs.ms((count, request.num_done) for request, count in pieces)
        for request, count in pieces:
            request.num_done += count
        return _Step([(request, not request.num_left) for request, _ in pieces], alone_ms, has_whole)

    def _begin(self) -> None:
        self._since_ms = self.events.now_ms
        step = self._launched[0]
        self.gpu.set_prompt(step.alone_ms, has_whole=step.has_whole)
        self.hasten()

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        step = self._launched.popleft()
        if self._launched:
            self._begin()
        self.resume()
        if not self._launched:
            self.gpu.set_prompt(0.0, has_whole=False)
        for request, is_complete in step.pieces:
            if is_complete:
                self._on_first(request)
