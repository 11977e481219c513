"""What a worker counts of its steps and pulls since its start, and how that travels with its heartbeats.

Counts by bucket, so that a router sees how the steps between two beats were, however many those were.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated

from common.wire.values.fields import Length, Total

STEP_BOUNDS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
STEP_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_DURATIONS, NUM_SIZES = len(STEP_BOUNDS_S) + 1, len(STEP_BOUNDS_TOKENS) + 1


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps over prompts of a prefill worker, decode steps of a decode worker."""

    durations: Annotated[tuple[Total, ...], Length(NUM_DURATIONS, NUM_DURATIONS)]  # how many, by STEP_BOUNDS_S
    sizes: Annotated[tuple[Total, ...], Length(NUM_SIZES, NUM_SIZES)]  # how many, by STEP_BOUNDS_TOKENS
    total_us: Total
    num_tokens: Total  # that they computed
    num_sequences: Total  # whose those were


@dataclass(frozen=True, slots=True)
class PullCounts:
    """Pulls of KV blocks out of other pools."""

    num_pulls: Total
    num_bytes: Total
    total_us: Total  # of the copies themselves; several may run at once


class PullMeter:
    """Counts pulls that are over."""

    def __init__(self) -> None:
        self._num_pulls = self._num_bytes = 0
        self._total_s = 0.0

    def note(self, num_pulls: int, num_bytes: int, seconds: float) -> None:
        """Pulls have arrived, which took so long one after the other."""
        self._num_pulls += num_pulls
        self._num_bytes += num_bytes
        self._total_s += seconds

    def counts(self) -> PullCounts:
        return PullCounts(self._num_pulls, self._num_bytes, int(self._total_s * 1e6))


class StepMeter:
    """Counts steps: a few additions each."""

    def __init__(self) -> None:
        self._durations, self._sizes = [0] * NUM_DURATIONS, [0] * NUM_SIZES
        self._total_s = 0.0
        self._num_tokens = self._num_sequences = 0

    def note(self, seconds: float, num_tokens: int, num_sequences: int) -> None:
        """A step is over."""
        self._durations[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self._sizes[bisect_left(STEP_BOUNDS_TOKENS, num_tokens)] += 1
        self._total_s += seconds
        self._num_tokens += num_tokens
        self._num_sequences += num_sequences

    def counts(self) -> StepCounts:
        """As they are now; another thread than the one that notes may ask."""
        return StepCounts(
            tuple(self._durations), tuple(self._sizes), int(self._total_s * 1e6), self._num_tokens, self._num_sequences
        )
