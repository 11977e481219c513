"""The router's Prometheus metrics, in a registry of its own.

Counters and histograms are fed as things happen; gauges are read from the pool and the dispatcher
when somebody scrapes. What every token feeds is plain numbers until then: the library's own take a lock each, and
thousands of tokens pass a second. No label ever carries text that a client chose.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.wire.memory_reports import MemoryHeartbeat
from common.wire.messages import Role
from router.member import Member
from router.memory_servers import MemoryServers
from router.request_state import Completion, State
from router.text_cache import TextCounts
from router.worker_pool import WorkerPool

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """What is counted and timed."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "baton_requests", "completions ended, by outcome", ["outcome"], registry=registry
        )  # stop, length, failed, aborted, rejected
        self.replays = Counter("baton_replays", "completions started again, by reason", ["reason"], registry=registry)
        self.prompt_tokens = Counter("baton_prompt_tokens", "prompt tokens of accepted completions", registry=registry)
        self.cached_tokens = Counter(
            "baton_cached_prompt_tokens", "prompt tokens that were not computed, as their KV was there",
            registry=registry,
        )  # fmt: skip
        self.expected_tokens = Counter(
            "baton_expected_cached_prompt_tokens", "the same, as they were expected where there are several pools",
            registry=registry,
        )  # fmt: skip
        self.stale_tokens = Counter(
            "baton_stale_tokens", "tokens dropped: of a dead worker, an old attempt or an ended completion",
            registry=registry,
        )  # fmt: skip
        self.ttft_s = Histogram(
            "baton_time_to_first_token_seconds", "request to first token", buckets=TTFT_BUCKETS_S, registry=registry
        )
        self.tokens = _Tokens()
        registry.register(self.tokens)
        self.e2e_s = Histogram(
            "baton_e2e_request_latency_seconds", "request to last token", buckets=E2E_BUCKETS_S, registry=registry
        )

    def token_arrived(self, completion: Completion, now_s: float) -> None:
        """Time one token, in order, and note when it came."""
        self.tokens.num_generated += 1
        if completion.first_token_s:
            self.tokens.note_gap(now_s - completion.last_token_s)
        else:
            completion.first_token_s = now_s
            self.ttft_s.observe(now_s - completion.submitted_s)
        completion.last_token_s = now_s

    def ended(self, completion: Completion, now_s: float) -> None:
        """Count one completion in a terminal state."""
        self.requests.labels(completion.finish_reason or completion.state.value).inc()
        if completion.state is State.FINISHED:
            self.e2e_s.observe(now_s - completion.submitted_s)

    def observe_state(
        self,
        pool: WorkerPool,
        memory_servers: MemoryServers,
        queue_sizes: Callable[[], tuple[int, int, int]],
        num_dropped: Callable[[], int],
    ) -> None:
        """Add the gauges; `queue_sizes` gives completions queued, prompt tokens queued, completions running."""
        self.registry.register(_StateCollector(pool, memory_servers, queue_sizes, num_dropped))

    def observe_texts(self, counts: Callable[[], TextCounts]) -> None:
        """Add what became of texts."""
        self.registry.register(_TextCollector(counts))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _Tokens(Collector):
    """What every token feeds; only the event loop does."""

    def __init__(self) -> None:
        self.num_generated = 0
        self._num_gaps = [0] * (len(ITL_BUCKETS_S) + 1)  # by bucket, the last without a bound
        self._sum_s = 0.0

    def note_gap(self, gap_s: float) -> None:
        """Time from one token to the next of its completion."""
        self._num_gaps[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("baton_generation_tokens", "tokens received in order", value=self.num_generated)
        bounds: Sequence[str] = [*map(floatToGoString, ITL_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._num_gaps), strict=True))
        yield HistogramMetricFamily(
            "baton_inter_token_latency_seconds", "token to token", buckets=buckets, sum_value=self._sum_s
        )


class _TextCollector(Collector):
    def __init__(self, counts: Callable[[], TextCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        family = CounterMetricFamily(
            "baton_text_tokens", "tokens of texts: found, as encoded before, or encoded", labels=["source"]
        )
        family.add_metric(["cache"], counts.num_found)
        family.add_metric(["tokenizer"], counts.num_encoded)
        yield family


class _StateCollector(Collector):
    def __init__(
        self,
        pool: WorkerPool,
        memory_servers: MemoryServers,
        queue_sizes: Callable[[], tuple[int, int, int]],
        num_dropped: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._memory_servers = memory_servers
        self._queue_sizes = queue_sizes
        self._num_dropped = num_dropped

    def collect(self) -> Iterator[Metric]:
        num_queued, num_queued_tokens, num_running = self._queue_sizes()
        yield GaugeMetricFamily("baton_requests_queued", "completions waiting for a worker", value=num_queued)
        yield GaugeMetricFamily("baton_queued_prompt_tokens", "their prompt tokens", value=num_queued_tokens)
        yield GaugeMetricFamily("baton_requests_running", "completions at workers", value=num_running)
        yield self._dropped_frames()
        yield self._workers()
        yield from self._standbys()
        yield from self._worker_loads()
        yield self._kv_paths()
        yield from self._memory_loads()

    def _dropped_frames(self) -> Metric:
        family = GaugeMetricFamily("baton_dropped_frames", "frames dropped since start, by process", labels=["process"])
        family.add_metric(["router"], self._num_dropped())
        for worker in self._pool:
            family.add_metric([worker.id], worker.beat.num_dropped_frames if worker.beat else 0)
        return family

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("baton_workers", "registered workers", labels=["role"])
        for role in Role:
            family.add_metric([_name(role)], sum(worker.ready.role is role for worker in self._pool))
        return family

    def _standbys(self) -> Iterator[Metric]:
        reserve = GaugeMetricFamily("baton_workers_in_reserve", "standbys that nobody needs", labels=["role"])
        needed = CounterMetricFamily("baton_standbys_needed", "times that a standby was needed", labels=["role"])
        for role in Role:
            members = [worker for worker in self._pool if worker.ready.role is role]
            reserve.add_metric([_name(role)], sum(worker.in_reserve for worker in members))
            needed.add_metric([_name(role)], self._pool.standbys.num_needed[role])
        yield from (reserve, needed)

    def _worker_loads(self) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[Member], float]]] = {
            "baton_worker_running": ("sequences in the worker's batch", _beat("num_running")),
            "baton_worker_waiting": ("requests waiting in the worker", _beat("num_waiting")),
            "baton_worker_handoffs": ("KV handoffs under way", _beat("num_handoffs")),
            "baton_worker_pulled_blocks": ("KV blocks pulled from other pools since start", _beat("num_pulled_blocks")),
            "baton_worker_found_blocks": ("the same, not pulled as they were there", _beat("num_found_blocks")),
            "baton_worker_used_blocks": ("KV blocks of its pool that it uses", lambda worker: worker.num_used_blocks),
            "baton_worker_blocks": (
                "KV blocks of its pool, which others may share",
                lambda worker: sum(worker.ready.num_blocks),
            ),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=["worker", "role"])
            for worker in self._pool:
                family.add_metric([worker.id, _name(worker.ready.role)], value(worker))
            yield family

    def _kv_paths(self) -> Metric:
        family = GaugeMetricFamily(
            "baton_kv_path_gb_per_second",
            "how KV blocks travel and how fast; 0: the path failed, infinity: they stay where they are",
            labels=["prefill", "decode", "transport"],
        )
        for path in self._pool.paths:
            value = 0.0 if path.error else path.gb_per_s or math.inf
            family.add_metric([path.prefill_worker_id, path.worker_id, path.transport], value)
        return family

    def _memory_loads(self) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[MemoryHeartbeat], float]]] = {
            "baton_memory_weights_bytes": ("of weights that a memory server owns", lambda beat: beat.weights_bytes),
            "baton_memory_free_bytes": ("that its device has left", lambda beat: beat.free_bytes),
            "baton_memory_blocks": ("KV blocks of its pools", lambda beat: beat.num_blocks),
            "baton_memory_free_blocks": ("KV blocks of its pools, free", lambda beat: beat.num_free_blocks),
            "baton_memory_cached_blocks": ("of those, kept for others to begin with", lambda b: b.num_cached_blocks),
            "baton_memory_offered_blocks": ("KV blocks handed over, not taken yet", lambda b: b.num_offered_blocks),
            "baton_memory_quarantined_blocks": ("KV blocks of the dead", lambda beat: beat.num_quarantined_blocks),
            "baton_memory_host_blocks": ("KV blocks in its host tier", lambda beat: beat.num_host_blocks),
            "baton_memory_host_bytes": ("host memory of that tier, as far as it is there", lambda b: b.host_bytes),
            "baton_memory_workers": ("workers on it", lambda beat: len(beat.worker_ids)),
        }
        counters: dict[str, tuple[str, Callable[[MemoryHeartbeat], float]]] = {
            "baton_memory_restored_blocks": ("KV blocks restored from host memory", lambda b: b.num_restored_blocks),
            "baton_memory_copied_out_bytes": ("KV blocks copied to host memory", lambda beat: beat.copied_out_bytes),
            "baton_memory_copied_in_bytes": ("KV blocks copied back", lambda beat: beat.copied_in_bytes),
        }
        known = GaugeMetricFamily(
            "baton_memory_known_blocks", "KV blocks of which it tells by which texts they are found", labels=["server"]
        )
        for server in self._memory_servers:
            known.add_metric([server.id], self._pool.prefixes.told_by(server.id) or 0)
        yield known
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                family = kind(name, text, labels=["server"])
                for server in self._memory_servers:
                    family.add_metric([server.id], value(server.beat) if server.beat else 0.0)
                yield family


def _name(role: Role) -> str:
    return role.name.lower()


def _beat(field: str) -> Callable[[Member], float]:
    return lambda worker: getattr(worker.beat, field) if worker.beat else 0.0
