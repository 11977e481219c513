"""Decision between overlap and turns on a shared GPU, by two targets: pauses of streams, and waits for first tokens.

Side by side, prompts and decode steps together get at most a tenth more out of a GPU than one after the other. So the
decision is who waits. While all prompts are in time, both run side by side, and streams have short gaps. When a prompt
would be late, the two take **turns**: beside each prompt step, which has the whole GPU, runs a single decode step. The
prompt step is as long as the target of pauses allows.

A client's streams always wait for prompts of the same client. For those of others they wait only in bursts, by an
`Allowance`. So a client that sends prompts without end delays its own streams, and nobody else's.

Forecasts decide, not violations. Measured pauses correct the forecasts. Decisions change only between prompt steps,
with hysteresis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.base.percentiles import percentile
from common.serving.turns.allowance import Allowance
from common.settings.slo_section import SloSection

TURN_TOKENS = (8192, 6144, 4096, 3072, 2048, 1536, 1024)
"""Sizes of prompt steps in turns; the last is taken even if too long, because smaller ones waste a prompt's speed."""
LEAST_TOKENS = 512
"""Fewer waiting tokens than these never stop streams: a turn would cost more than they take."""
PATIENCE = 2.0
"""Multiple of its own time by which a prompt may be later than the target, so that long ones are not always late."""
CALM = 0.5
"""Part of the target below which prompts are in time again."""
MARGIN_MS = 2.0
"""Time of a pause beside its two steps: from the end of a prompt step until the next decode step is launched."""
NUM_PAUSES, MOST_SLOWNESS = 64, 2.0
"""Pauses of a correction, and the most that forecasts are stretched."""
OVERTIME = 1.2
"""Multiple of a forecast after which a claim of the GPU ends by itself."""


class Forecast(Protocol):
    """Times on the whole GPU, alone, in milliseconds."""

    def span_ms(self, begin: int, end: int) -> float:
        """Return the time of a prompt's tokens from `begin` to `end`, within full steps."""

    def step_ms(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of a step over chunks, each with its tokens and those before."""


class Waiting(NamedTuple):
    """A prompt with tokens left to launch."""

    age_ms: float  # since its arrival
    num_cached: int  # tokens found
    num_done: int  # tokens found or launched
    num_tokens: int  # of the prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """The next prompt step. In a turn it has at most `num_tokens` and the whole GPU, beside a single decode step."""

    is_turn: bool
    num_tokens: int = 0  # 0: as many as usual
    pause_ms: float = 0.0  # forecast of the streams' pause
    is_own: bool = True  # all prompts and streams are of one client

    def claim_ms(self, targets: SloSection) -> float:
        """Return how long the turn's claim of the GPU lasts at most."""
        return min(OVERTIME * self.pause_ms, max(2 * targets.itl_ms, self.pause_ms))


SIDE_BY_SIDE = Plan(is_turn=False)


@dataclass(slots=True)
class TurnLaw:
    """The law, called before each launch of a prompt step.

    shared_speed: speed of prompts side by side with decode steps, relative to alone.
    """

    targets: SloSection
    forecast: Forecast
    shared_speed: float = 0.6
    is_pressed: bool = field(init=False, default=False)  # some prompt would be late side by side
    num_changes: int = field(init=False, default=0)  # of `is_pressed`
    in_turns: bool = field(init=False, default=False)  # the last plan was a turn
    allowance: Allowance = field(init=False, default_factory=Allowance)
    slowness: float = field(init=False, default=1.0)  # of measured pauses, relative to forecasts; at least 1
    _ratios: list[float] = field(init=False, default_factory=list)
    _seen_ms: float = field(init=False, default=0.0)  # time of the last plan

    def plan(
        self,
        prompts: Sequence[Waiting],
        decode_ms: float,
        running_ms: float = 0.0,
        *,
        now_ms: float = 0.0,
        is_own: bool = True,
    ) -> Plan:
        """Return the next step of prompts in the order in which they are computed.

        Args:
            decode_ms: time of a decode step alone; 0 if nothing is decoded.
            running_ms: what is left of launched prompt steps, alone on the whole GPU.
            now_ms: by any clock that never goes back.
            is_own: all prompts and streams are of one client.
        """
        if not self.is_pressed:
            self.allowance.earn(now_ms - self._seen_ms)
        self._seen_ms = now_ms
        self._press(self._would_be_late(prompts, running_ms))
        is_due = self.is_pressed and decode_ms > 0 and _num_left(prompts) >= LEAST_TOKENS
        self.in_turns = is_due and (is_own or self.allowance.left_ms > 0)
        return self._turn(prompts, decode_ms, is_own) if self.in_turns else SIDE_BY_SIDE

    def paused(self, plan: Plan, pause_ms: float) -> None:
        """Record a measured pause of streams around the turn of `plan`; many together correct the forecasts."""
        if not plan.is_own:
            self.allowance.spend(pause_ms)
        self._ratios.append(pause_ms / plan.pause_ms)
        if len(self._ratios) == NUM_PAUSES:
            self.slowness = min(MOST_SLOWNESS, max(1.0, percentile(self._ratios, 99)))
            self._ratios.clear()

    def _turn(self, prompts: Sequence[Waiting], decode_ms: float, is_own: bool) -> Plan:
        for num_tokens in TURN_TOKENS:
            pause_ms = self.forecast.step_ms(_chunks(prompts, num_tokens)) + decode_ms + MARGIN_MS
            if self.slowness * pause_ms <= self.targets.itl_ms:
                break
        return Plan(True, num_tokens, pause_ms, is_own)

    def _would_be_late(self, prompts: Sequence[Waiting], running_ms: float) -> float | None:
        """Return how late the latest prompt would be side by side, in milliseconds; None without a prompt."""
        latest_ms, ahead_ms = None, running_ms
        for prompt in prompts:
            ahead_ms += self.forecast.span_ms(prompt.num_done, prompt.num_tokens)
            own_ms = self.forecast.span_ms(prompt.num_cached, prompt.num_tokens)
            late_ms = prompt.age_ms + ahead_ms / self.shared_speed - PATIENCE * own_ms
            latest_ms = late_ms if latest_ms is None else max(latest_ms, late_ms)
        return latest_ms

    def _press(self, late_ms: float | None) -> None:
        before, target_ms = self.is_pressed, self.targets.ttft_ms
        if late_ms is None or not self.targets.itl_ms:
            self.is_pressed = False
        elif not target_ms or late_ms > target_ms:
            self.is_pressed = True
        elif late_ms < CALM * target_ms:
            self.is_pressed = False
        self.num_changes += self.is_pressed != before


def _num_left(prompts: Sequence[Waiting]) -> int:
    return sum(prompt.num_tokens - prompt.num_done for prompt in prompts)


def _chunks(prompts: Sequence[Waiting], num_tokens: int) -> list[tuple[int, int]]:
    """Return the chunks of the first `num_tokens` tokens."""
    chunks = []
    for prompt in prompts:
        count = min(num_tokens, prompt.num_tokens - prompt.num_done)
        chunks.append((count, prompt.num_done))
        num_tokens -= count
        if not num_tokens:
            break
    return chunks
