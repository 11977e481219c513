"""History of the last minutes for the status page: a sample every other second.

Samples are differences of counters, so nothing has to be noted as things happen.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Histogram

from common.wire.values.step_counts import StepCounts
from router.dispatch.metrics import ITL_BOUNDS_S, TTFT_BOUNDS_S, Metrics
from router.observe.fleet_metrics import QueueSizes, kv_usage
from router.placement.worker_pool import WorkerPool
from router.workers.memory_servers import MemoryServers

PERIOD_S = 2.0
NUM_SAMPLES = 150


class Sample(NamedTuple):
    """Values of a period; times in milliseconds, None without a measurement."""

    at_s: float  # wall clock at the period's end
    queued: int
    running: int
    tokens_per_s: float
    failed_per_s: float  # completions whose clients got an error
    refused_per_s: float  # HTTP requests refused before becoming completions
    kv_usage: float  # share of all KV blocks in use
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Pace:
    """A worker's progress in the last period."""

    step_ms: float | None  # None without a step
    written_per_s: float  # decoded tokens, as received by the router
    computed_per_s: float  # tokens computed in steps, as the worker reports
    busy: float  # share of the time spent in steps


IDLE = Pace(None, 0.0, 0.0, 0.0)


class Work(NamedTuple):
    """A worker's totals at the end of a period."""

    steps: StepCounts | None  # None before the first heartbeat
    num_outputs: int  # decoded tokens


NOTHING = Work(None, 0)


class Seen(NamedTuple):
    """Counters at the end of a period."""

    at_s: float
    num_tokens: int
    num_failed: int
    num_refused: int
    gaps: Sequence[float]  # cumulative counts of buckets
    firsts: Sequence[float]  # cumulative counts of buckets
    work: dict[bytes, Work]  # by a worker's connection


class History:
    """Samples, oldest first, and each worker's pace."""

    def __init__(
        self, metrics: Metrics, pool: WorkerPool, memory_servers: MemoryServers, queue_sizes: QueueSizes
    ) -> None:
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._metrics, self._pool, self._memory_servers = metrics, pool, memory_servers
        self._queue_sizes, self._clock = queue_sizes, pool.clock
        self._paces: dict[bytes, Pace] = {}
        self._before = self._seen()

    def pace(self, connection: bytes) -> Pace:
        """Return a worker's pace in the last period."""
        return self._paces.get(connection, IDLE)

    def tick(self) -> None:
        """Take a sample once a period is over; call more often."""
        if self._clock() - self._before.at_s >= PERIOD_S:
            before, now = self._before, self._seen()
            self._before = now
            self.samples.append(self._sample(before, now))
            period_s = now.at_s - before.at_s
            self._paces = {
                connection: _pace(before.work.get(connection, NOTHING), work, period_s)
                for connection, work in now.work.items()
            }

    def _seen(self) -> Seen:
        metrics, tokens = self._metrics, self._metrics.tokens
        work = {
            each.connection: Work(each.beat.steps if each.beat else None, each.outputs.num_tokens)
            for each in self._pool
        }
        gaps = list(accumulate(map(float, tokens.num_gaps)))
        return Seen(
            self._clock(), tokens.num_generated, metrics.num_failed, metrics.num_refused, gaps,
            _cumulative(metrics.ttft_s), work,
        )  # fmt: skip

    def _sample(self, before: Seen, now: Seen) -> Sample:
        num_queued, _, num_running = self._queue_sizes()
        gaps, firsts = _grown(before.gaps, now.gaps), _grown(before.firsts, now.firsts)
        period_s = now.at_s - before.at_s
        return Sample(
            at_s=round(time.time(), 1),
            queued=num_queued,
            running=num_running,
            tokens_per_s=round((now.num_tokens - before.num_tokens) / period_s, 1),
            failed_per_s=round((now.num_failed - before.num_failed) / period_s, 2),
            refused_per_s=round((now.num_refused - before.num_refused) / period_s, 2),
            kv_usage=round(kv_usage(self._pool, self._memory_servers), 4),
            ttft_p50_ms=_ms(quantile(TTFT_BOUNDS_S, firsts, 0.5)),
            ttft_p99_ms=_ms(quantile(TTFT_BOUNDS_S, firsts, 0.99)),
            itl_p50_ms=_ms(quantile(ITL_BOUNDS_S, gaps, 0.5)),
            itl_p99_ms=_ms(quantile(ITL_BOUNDS_S, gaps, 0.99)),
        )


def quantile(bounds: Sequence[float], cumulative: Sequence[float], share: float) -> float | None:
    """Return a quantile of values in buckets, interpolated like Prometheus; None without values.

    Args:
        bounds: upper bounds, ascending.
        cumulative: [len(bounds) + 1], number of values up to each bound, then of all values.
    """
    if not cumulative[-1]:
        return None
    rank = share * cumulative[-1]
    below, num_below = 0.0, 0.0
    for bound, num in zip(bounds, cumulative, strict=False):
        if num >= rank:
            return below + (bound - below) * (rank - num_below) / (num - num_below)
        below, num_below = bound, num
    return bounds[-1]


def _pace(before: Work, now: Work, period_s: float) -> Pace:
    written_per_s = (now.num_outputs - before.num_outputs) / period_s
    if before.steps is None or now.steps is None:
        return Pace(None, written_per_s, 0.0, 0.0)
    num_steps = sum(now.steps.durations) - sum(before.steps.durations)
    total_s = (now.steps.total_us - before.steps.total_us) / 1e6
    computed_per_s = (now.steps.num_tokens - before.steps.num_tokens) / period_s
    step_ms = total_s / num_steps * 1e3 if num_steps > 0 else None
    return Pace(step_ms, written_per_s, computed_per_s, min(1.0, total_s / period_s))


def _cumulative(histogram: Histogram) -> list[float]:
    (family,) = histogram.collect()
    return [sample.value for sample in family.samples if sample.name.endswith("_bucket")]


def _grown(before: Sequence[float], now: Sequence[float]) -> list[float]:
    return [count - earlier for count, earlier in zip(now, before, strict=True)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
