"""Workload to size a system for: requests of drawn lengths at a rate, or requests of a trace."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from common.base.errors import ConfigError
from deploy.planning.simulation.loads import Arrival, Lengths, Load, Prefixes

LEAST_LATE, MOST_REQUESTS = 15, 30_000
"""Expected late requests for a meaningful percentile, and most requests evaluated in a simulation."""
BEFORE, BEHIND = 3.0, 1.2
"""Simulated time before and behind the evaluated requests, in durations of a request."""
SPANS, LEAST_S = 3.0, 20.0
"""Least evaluated time, in durations of a request and in seconds."""
NUM_DRAWN = 1_000
"""Requests drawn for means."""


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths in tokens, uniform over an inclusive range."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True)
class Steady:
    """`rate` requests a second with random arrivals (Poisson)."""

    rate: float
    inputs: Span
    outputs: Span
    prefixes: Prefixes | None = None  # before `inputs`

    @property
    def name(self) -> str:
        behind = f" behind {self.prefixes}" if self.prefixes else ""
        return f"{shown(self.rate)} requests/s of {self.inputs} prompt and {self.outputs} output tokens{behind}"

    @property
    def lengths(self) -> Sequence[Lengths]:
        """Lengths of some requests as sent, without cached prefixes."""
        rng = random.Random("0, lengths")
        return [self._draw(rng) for _ in range(NUM_DRAWN)]

    def load(self, request_s: float, percent: float) -> Load:
        """Return requests to simulate; requests at both ends are not evaluated.

        The first requests fill the batches, because steps take longer as batches fill, until the load is steady. The
        last requests keep the load while others end.

        Args:
            request_s: duration of a request with full batches.
            percent: percentage of requests to keep the limits.
        """
        first_s = BEFORE * request_s
        least_requests = LEAST_LATE / (1 - percent / 100)
        span_s = max(least_requests / self.rate, SPANS * request_s, LEAST_S)
        span_s = min(span_s, max(MOST_REQUESTS / self.rate, request_s))
        count = int(self.rate * (first_s + span_s + BEHIND * request_s)) + 1
        rng, known = random.Random(f"0, {self.rate:g}"), self.prefixes.all if self.prefixes else []
        times_s = accumulate(rng.expovariate(self.rate) for _ in range(count))
        arrivals = [Arrival(time_s * 1e3, *self._draw(rng)) for time_s in times_s]
        if known:
            rng = random.Random("0, prefixes")
            arrivals = [replace(each, prefix=rng.choice(known)) for each in arrivals]
        return Load(arrivals, first_ms=first_s * 1e3, last_ms=(first_s + span_s) * 1e3, known=known)

    def _draw(self, rng: random.Random) -> Lengths:
        inputs = self.inputs.draw(rng) + (self.prefixes.num_tokens if self.prefixes else 0)
        return Lengths(inputs, self.outputs.draw(rng))


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a trace, at least two, in order of arrival."""

    arrivals: Sequence[Arrival]
    source: str
    prefixes: None = field(default=None, init=False)  # a trace has none

    def __post_init__(self) -> None:
        if len(self.arrivals) < 2 or self.arrivals[-1].time_ms <= self.arrivals[0].time_ms:
            raise ConfigError(f"{self.source}: {len(self.arrivals)} requests at one moment: at least two, one later")

    @property
    def name(self) -> str:
        span_s = (self.arrivals[-1].time_ms - self.arrivals[0].time_ms) / 1e3
        return f"{len(self.arrivals):,} requests of {self.source} in {span_s:,.1f} s, {shown(self.rate)} a second"

    @property
    def rate(self) -> float:
        return len(self.arrivals) / (self.arrivals[-1].time_ms - self.arrivals[0].time_ms) * 1e3

    @property
    def lengths(self) -> Sequence[Lengths]:
        """Lengths of evenly chosen requests."""
        step = max(1, len(self.arrivals) // NUM_DRAWN)
        return [each.lengths for each in self.arrivals[::step]]

    def load(self, request_s: float, percent: float) -> Load:
        """Return all requests, whatever the arguments."""
        return Load(self.arrivals)


Workload = Steady | Replay


def shown(rate: float) -> str:
    """Format a rate for people."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
