"""A simulated prefill worker: steps in the workers' own order, one running and one launched behind."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.serving.prompts.order import PromptOrder, turn_of
from common.serving.turns.law import LEAST_TOKENS, SIDE_BY_SIDE, Plan, Waiting
from common.settings.config import PrefillSection
from common.settings.memory_sections import MemorySection
from deploy.planning.simulation.events import Events
from deploy.planning.simulation.gpu import Gpu
from deploy.planning.simulation.loads import Prefix
from deploy.planning.simulation.request import Request
from deploy.planning.step_times.costs import Costs

LIMITS = PrefillSection()
"""Limits of a step."""
DECODE_RESERVE = MemorySection().decode_reserve
"""Share of a pool left by prompts to decode workers."""
MAX_LAUNCHED = 2
"""Steps in flight: one runs, one follows."""


@dataclass(slots=True)
class _Step:
    """A launched step."""

    pieces: list[tuple[Request, int]]  # prompts, and tokens of each done after the step
    num_tokens: int
    alone_ms: float  # with the step's share of the GPU, no neighbour
    has_whole: bool
    plan: Plan
    left_ms: float = field(init=False)

    def __post_init__(self) -> None:
        self.left_ms = self.alone_ms


class PrefillWorker:
    """A prefill worker.

    Args:
        on_found: called with each waiting prompt whose prefix another prompt has completed.
        on_first: called with each complete prompt.
    """

    def __init__(
        self,
        gpu: Gpu,
        costs: Costs,
        events: Events,
        on_found: Callable[[Request], None],
        on_first: Callable[[Request], None],
    ) -> None:
        self.gpu, self.costs, self.events, self._on_found, self._on_first = gpu, costs, events, on_found, on_first
        self._order = PromptOrder(costs.step_tokens, LIMITS.max_num_seqs, LIMITS.max_mixed_tokens)
        self._waiting: list[Request] = []  # prompts with tokens left to launch
        self._launched: deque[_Step] = deque()
        self._since_ms, self._speed, self._version = 0.0, 1.0, 0
        self._begun_ms, self._turn = 0.0, 0  # of the running step
        gpu.prefill = self

    def take(self, request: Request) -> None:
        """Queue a prompt and look up its prefix."""
        self._finds(request)
        self._waiting.append(request)
        self.resume()

    def resume(self) -> None:
        """Launch steps while there are prompts, room and free places in the pipeline."""
        while self._waiting and len(self._launched) < MAX_LAUNCHED:
            plan = self._plan()
            num_launched = sum(step.num_tokens for step in self._launched)
            pieces = self._order.next_step(
                self._waiting, self._admit, self._is_held_up, num_launched=num_launched, most=plan.num_tokens
            )
            if not pieces:
                return
            self._launched.append(self._step(pieces, plan))
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
        """Allocate KV blocks, if there are enough beside the reserve of decode workers.

        The prefix may have been evicted since the lookup.
        """
        pool, num_own = self.gpu.pool, self.gpu.held_by(request)
        if pool.wanted(request, num_own) > self._room:
            return False
        if request.prefix is not None and not self._finds(request):
            request.find(0)
            pool.computing.setdefault(request.prefix, request)
        pool.take(request, num_own)
        request.is_started = True
        return True

    @property
    def _room(self) -> float:
        """Free tokens of the pool beside the reserve of decode workers; may be below 0."""
        return self.gpu.pool.free_tokens - DECODE_RESERVE * self.gpu.pool.num_tokens

    def _finds(self, request: Request) -> bool:
        """Tell whether the prefix is cached; then the prompt is computed from behind the prefix."""
        if request.prefix is None or not self.gpu.pool.has(request.prefix):
            return False
        request.find(request.prefix.num_tokens)
        return True

    def _is_held_up(self, request: Request) -> bool:
        """Tell whether a prompt waits for another with the same prefix, as in `common/serving/prompts/prefixes.py`."""
        if request.is_started or request.prefix is None:
            return False
        other = self.gpu.pool.computing.get(request.prefix)
        return other is not None and (not other.num_left or other.turn <= request.turn)

    def _computed(self, step: _Step) -> list[Request]:
        """Return waiting requests whose prefix was completed by the step."""
        computing, prefixes = self.gpu.pool.computing, set[Prefix]()
        for request, num_done in step.pieces:
            prefix = request.prefix
            if prefix is not None and computing.get(prefix) is request and num_done >= prefix.num_tokens:
                del computing[prefix]
                prefixes.add(prefix)
        waiting = [request for request in self._waiting if not request.is_started and request.prefix in prefixes]
        return [request for request in waiting if self._finds(request)]

    def _end_turn(self, step: _Step) -> None:
        """End the claim, unless another turn follows, and tell the law how long streams have paused."""
        if self.gpu.decode is not None:
            self.gpu.law.paused(step.plan, self.events.now_ms - self._begun_ms)
        if not (self._launched and self._launched[0].plan.is_turn):
            self.gpu.page.release(self._turn)
            if self.gpu.decode is not None:
                self.gpu.decode.go_on()

    def _plan(self) -> Plan:
        """Return the plan of the next step; turns are taken only on a shared GPU."""
        law, decode = self.gpu.law, self.gpu.decode
        if decode is None:
            return SIDE_BY_SIDE
        now_ms = self.events.now_ms
        waiting = self._in_turn()
        prompts = [Waiting(now_ms - each.arrived_ms, each.num_found, each.num_done, each.num_tokens)
                   for each in waiting]  # fmt: skip
        self.settle()
        running_ms = sum(step.left_ms for step in self._launched)
        decode_ms = decode.step_ms if decode.num_rows else 0.0
        is_own = {each.client for each in waiting} == {decode.client}
        return law.plan(prompts, decode_ms, running_ms, now_ms=now_ms, is_own=is_own)

    def _in_turn(self) -> list[Request]:
        """Return prompts that wait for nothing but the device, in order of turn."""
        left, found = max(0.0, self._room), list[Request]()
        for request in sorted(self._waiting, key=turn_of):
            wanted = 0 if request.is_started else self.gpu.pool.wanted(request, self.gpu.held_by(request))
            if wanted <= left:
                found.append(request)
                left -= wanted
        return found

    def _has_whole(self, pieces: list[tuple[Request, int]], plan: Plan) -> bool:
        if self.gpu.decode is None or not self.gpu.decode.num_rows:
            return len(pieces) == 1 or sum(count for _, count in pieces) >= LEAST_TOKENS
        return plan.is_turn

    def _step(self, pieces: list[tuple[Request, int]], plan: Plan) -> _Step:
        has_whole = self._has_whole(pieces, plan)
        costs = self.costs.whole if has_whole else self.costs.part
        alone_ms = costs.ms((count, request.num_done) for request, count in pieces)
        for request, count in pieces:
            request.num_done += count
        num_tokens = sum(count for _, count in pieces)
        return _Step([(request, request.num_done) for request, _ in pieces], num_tokens, alone_ms, has_whole, plan)

    def _begin(self) -> None:
        self._since_ms = self._begun_ms = self.events.now_ms
        step, decode = self._launched[0], self.gpu.decode
        if step.plan.is_turn and decode is not None:
            self._turn += 1
            until_ms = self.events.now_ms + step.plan.claim_ms(self.gpu.targets)
            self.gpu.page.claim(self._turn, int(until_ms * 1e3))
            decode.end_leap()
        self.gpu.set_prompt(step.alone_ms, has_whole=step.has_whole)
        self.hasten()
        if step.plan.is_turn and decode is not None:
            decode.go_on()

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        step = self._launched.popleft()
        if step.plan.is_turn:
            self._end_turn(step)
        if self._launched:
            self._begin()
        found = self._computed(step)
        self.resume()
        if not self._launched:
            self.gpu.set_prompt(0.0, has_whole=False)
        for request in found:
            self._on_found(request)
        for request, num_done in step.pieces:
            if num_done == request.num_tokens:
                self._on_first(request)
