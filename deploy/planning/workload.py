"""Workload to size a system for: requests of drawn lengths at a rate, or requests of a trace."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.base.errors import ConfigError
from deploy.planning.simulation.loads import Arrival, Lengths, Load, Prefixes, poisson

LEAST_LATE, MOST_REQUESTS = 15, 30_000
"""Expected late requests for a meaningful percentile, and most requests evaluated in a simulation."""
MOST_SIMULATED = 1_000_000
"""Most simulated requests in all: minutes of time, and a gigabyte."""
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
    seed: int = 0
    num_cached: int = 0  # cached tokens at the begin of each prompt, at most its length
    prefixes: Prefixes | None = None  # before `inputs`; not with `num_cached`

    @property
    def name(self) -> str:
        cached = f", of the prompt's {self.num_cached:,} there already" if self.num_cached else ""
        behind = f" behind {self.prefixes}" if self.prefixes else ""
        return f"{shown(self.rate)} requests/s of {self.inputs} prompt and {self.outputs} output tokens{behind}{cached}"

    @property
    def lengths(self) -> Sequence[Lengths]:
        """Lengths of some requests as sent, without cached prefixes."""
        rng = random.Random(f"{self.seed}, lengths")
        return [self._draw(rng) for _ in range(NUM_DRAWN)]

    def of(self, num_parts: int) -> "Steady":
        """Return a load with the rate divided by `num_parts`."""
        return replace(self, rate=self.rate / num_parts)

    def load(self, request_s: float, percent: float) -> Load:
        """Return requests to simulate; requests at both ends are not evaluated.

        The first requests fill the batches, because steps take longer as batches fill, until the load is steady. The
        last requests keep the load while others end.

        Args:
            request_s: duration of a request with full batches.
            percent: percentage of requests to keep the limits.

        Raises:
            ConfigError: too many requests would be under way.
        """
        first_s = BEFORE * request_s
        least_requests = LEAST_LATE / (1 - percent / 100)
        span_s = max(least_requests / self.rate, SPANS * request_s, LEAST_S)
        span_s = min(span_s, max(MOST_REQUESTS / self.rate, request_s))
        count = int(self.rate * (first_s + span_s + BEHIND * request_s)) + 1
        if count > MOST_SIMULATED:
            raise ConfigError(
                f"{shown(self.rate)} requests/s that last {request_s:,.1f} s: {count:,} would have to be simulated, at "
                f"most {MOST_SIMULATED:,}; plan for a part of the load, and multiply"
            )
        arrivals = poisson(self.rate, count, self._draw, f"{self.seed}, {self.rate:g}").arrivals
        known = self.prefixes.all if self.prefixes else []
        if known:
            rng = random.Random(f"{self.seed}, prefixes")
            arrivals = [replace(each, prefix=rng.choice(known)) for each in arrivals]
        return Load(arrivals, first_ms=first_s * 1e3, last_ms=(first_s + span_s) * 1e3, known=known)

    def _draw(self, rng: random.Random) -> Lengths:
        inputs = self.inputs.draw(rng) + (self.prefixes.num_tokens if self.prefixes else 0)
        return Lengths(inputs, self.outputs.draw(rng), min(self.num_cached, inputs - 1))


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests of a trace, at least two, in order of arrival."""

    arrivals: Sequence[Arrival]
    source: str
    seed: int = 0
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

    def of(self, num_parts: int) -> "Replay":
        """Return a random part of 1 / `num_parts` of the requests, with the first and the last."""
        rng = random.Random(f"{self.seed}, {num_parts}")
        first, *others, last = self.arrivals
        return replace(self, arrivals=[first, *(each for each in others if rng.random() * num_parts < 1), last])

    def load(self, request_s: float, percent: float) -> Load:
        """Return all requests, whatever the arguments."""
        return Load(self.arrivals)


Workload = Steady | Replay


def shown(rate: float) -> str:
    """Format a rate for people."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
