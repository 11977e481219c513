"""Plans of prompt steps: with or without turns. Turns follow the law, on a page shared with decode workers."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.serving.turns.forecast import LearnedForecast
from common.serving.turns.law import LEAST_TOKENS, SIDE_BY_SIDE, Plan, TurnLaw, Waiting
from common.serving.turns.page import TurnPage

Chunks = Sequence[tuple[int, int]]
"""Of a step: tokens of each prompt, and its tokens before."""
COUNTER_BITS = 32


class Prompt(Protocol):
    """Properties of a prompt that decide about turns."""

    @property
    def client(self) -> int:
        """Number of its client."""

    @property
    def arrived_s(self) -> float:
        """Begin of its wait for a first or next token, by the monotonic clock."""

    @property
    def num_found(self) -> int:
        """Tokens found in the pool."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens found or launched."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    plan: Plan
    chunks: Chunks
    has_whole: bool  # has the whole GPU


class StepPlans:
    """Plans without turns, for workers without a page: steps keep to their share of the GPU, if there is a share."""

    num_turns = 0

    @property
    def in_turns(self) -> bool:
        """Tell whether streams wait for prompts."""
        return False

    def plan(self, prompts: Iterable[Prompt], in_flight: Sequence[Launched]) -> Plan:
        """Return the plan of the next step.

        Args:
            prompts: those with tokens to launch and blocks, in the order in which they are computed.
            in_flight: launched steps, the running one first.
        """
        return SIDE_BY_SIDE

    def has_whole(self, plan: Plan, chunks: Chunks) -> bool:
        """Tell whether a step has the whole GPU."""
        return False

    def begin(self, step: Launched) -> None:
        """Record that a step begins on the device."""

    def end(self, step: Launched, following: Launched | None) -> None:
        """Record the end of the running step, which is the begin of the one behind it."""


class PromptTurns(StepPlans):
    """Plans with turns; owner of the claims of a prefill worker.

    Args:
        writer: epoch of the worker.
    """

    def __init__(
        self,
        law: TurnLaw,
        forecast: LearnedForecast,
        page: TurnPage,
        writer: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.law, self.forecast, self.page, self._clock = law, forecast, page, clock
        self.num_turns: int = 0
        self._first = (writer << COUNTER_BITS) & (1 << 2 * COUNTER_BITS) - 1
        self._turn = 0  # claimed at present
        self._begun_s = 0.0  # of the running step

    @property
    def in_turns(self) -> bool:
        return self.law.in_turns

    def plan(self, prompts: Iterable[Prompt], in_flight: Sequence[Launched]) -> Plan:
        if not self.forecast.is_known:
            return SIDE_BY_SIDE
        now_s, prompts = self._clock(), list(prompts)
        waiting = [
            Waiting((now_s - each.arrived_s) * 1e3, each.num_found, each.num_scheduled_tokens, each.num_tokens)
            for each in prompts
        ]
        running_ms = sum(self.forecast.step_ms(step.chunks) for step in in_flight)
        if in_flight:
            running_ms = max(0.0, running_ms - (now_s - self._begun_s) * 1e3)
        is_own = {each.client for each in prompts} == {self.page.client()}
        return self.law.plan(waiting, self._decode_ms(), running_ms, now_ms=now_s * 1e3, is_own=is_own)

    def has_whole(self, plan: Plan, chunks: Chunks) -> bool:
        """Tell whether a step has the whole GPU: in a turn, and while nothing is decoded.

        A short step of several prompts keeps to the share, because only there it replays a graph.
        """
        if plan.is_turn or self._decode_ms():
            return plan.is_turn
        return len(chunks) == 1 or sum(count for count, _ in chunks) >= LEAST_TOKENS

    def begin(self, step: Launched) -> None:
        self._begun_s = self._clock()
        if not step.plan.is_turn:
            self._release()
            return
        self.num_turns += 1
        self._turn = self._first | self.num_turns & (1 << COUNTER_BITS) - 1
        until_s = self._begun_s + step.plan.claim_ms(self.law.targets) / 1e3
        self.page.claim(self._turn, int(until_s * 1e6))

    def end(self, step: Launched, following: Launched | None) -> None:
        took_ms = (self._clock() - self._begun_s) * 1e3
        if step.plan.is_turn:
            self.law.paused(step.plan, took_ms)
            self.forecast.learn(step.chunks, took_ms - self._decode_ms())
        elif step.has_whole:
            self.forecast.learn(step.chunks, took_ms)
        if following is None:
            self._release()
        else:
            self.begin(following)

    def _release(self) -> None:
        if self._turn:
            self.page.release(self._turn)
            self._turn = 0

    def _decode_ms(self) -> float:
        return self.page.step_us(int(self._clock() * 1e6)) / 1e3
