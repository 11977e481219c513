"""Counts of a worker's steps and pulls since the start of the process, sent with heartbeats.

Steps are counted by bucket, so the router sees the distribution of any number of steps between two heartbeats.
"""

from bisect import bisect_left
from typing import Annotated

from msgspec import Meta

from common.wire.values.fields import Total, WireStruct

STEP_BOUNDS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
STEP_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_DURATIONS, NUM_SIZES = len(STEP_BOUNDS_S) + 1, len(STEP_BOUNDS_TOKENS) + 1


class StepCounts(WireStruct):
    """Prefill steps of a prefill worker, or decode steps of a decode worker."""

    durations: Annotated[tuple[Total, ...], Meta(min_length=NUM_DURATIONS, max_length=NUM_DURATIONS)]
    """Steps by STEP_BOUNDS_S."""
    sizes: Annotated[tuple[Total, ...], Meta(min_length=NUM_SIZES, max_length=NUM_SIZES)]
    """Steps by STEP_BOUNDS_TOKENS."""
    total_us: Total
    num_tokens: Total  # computed by the steps
    num_sequences: Total  # summed over steps


class PullCounts(WireStruct):
    """Pulls of KV blocks from other pools."""

    num_pulls: Total
    num_bytes: Total
    total_us: Total  # copies only; several may run at once


class PullMeter:
    """A counter of finished pulls."""

    def __init__(self) -> None:
        self._num_pulls = self._num_bytes = 0
        self._total_s = 0.0

    def note(self, num_pulls: int, num_bytes: int, seconds: float) -> None:
        """Count finished pulls; `seconds` is the sum of their durations."""
        self._num_pulls += num_pulls
        self._num_bytes += num_bytes
        self._total_s += seconds

    def counts(self) -> PullCounts:
        return PullCounts(self._num_pulls, self._num_bytes, int(self._total_s * 1e6))


class StepMeter:
    """A counter of steps, at a few additions a step."""

    def __init__(self) -> None:
        self._durations, self._sizes = [0] * NUM_DURATIONS, [0] * NUM_SIZES
        self._total_s = 0.0
        self._num_tokens = self._num_sequences = 0

    def note(self, seconds: float, num_tokens: int, num_sequences: int) -> None:
        """Count a finished step."""
        self._durations[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self._sizes[bisect_left(STEP_BOUNDS_TOKENS, num_tokens)] += 1
        self._total_s += seconds
        self._num_tokens += num_tokens
        self._num_sequences += num_sequences

    def counts(self) -> StepCounts:
        """Return the counts so far; any thread may call."""
        return StepCounts(
            tuple(self._durations), tuple(self._sizes), int(self._total_s * 1e6), self._num_tokens, self._num_sequences
        )
