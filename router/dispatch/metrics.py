"""Counters and timings of the router, in a registry apart, and the export to Prometheus.

Counters and histograms are fed as things happen; the present state is read at each scrape (`fleet_metrics`). Values fed
by every token are plain numbers until a scrape, because the library's counters take a lock for each update. Thousands
of tokens pass a second. No label ever carries text chosen by a client.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from weakref import WeakSet

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.base.errors import ErrorCode, RequestError
from common.base.version import VERSION
from router.base.exposition import number
from router.dispatch.completion.journey import Phase
from router.dispatch.completion.state import Completion, State
from router.dispatch.completion.summary import Slowest
from router.dispatch.incidents import Incidents, Kind
from router.dispatch.vllm_names import aliases
from router.text.model_info import ModelInfo
from router.text.text_cache import TextCounts

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
PHASE_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""The three bounds above include all of vLLM's, so vLLM's dashboards read the histograms."""
HANDOFF_BOUNDS_S = PHASE_BOUNDS_S[:17]
TOKEN_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
OUTCOMES = ("stop", "length", "failed", "aborted", "rejected")
REPLAYS = ("worker_lost", "stalled", "internal", "preempted", "handoff_lost", "draining")
HANDOFF_LOST = ErrorCode.HANDOFF_LOST.name.lower()


class Metrics:
    """Counters and histograms of completions."""

    def __init__(self, incidents: Incidents | None = None) -> None:
        self.registry = CollectorRegistry()
        self.incidents = incidents or Incidents()
        self.slowest = Slowest()
        self.num_failed = self.num_refused = 0
        self._counted = WeakSet[RequestError]()  # errors of failed completions, until clients are told
        self.tokens, self.num_in = _Tokens(), Tally[Phase]()
        self.registry.register(self.tokens)
        self.registry.register(_Phases(self.num_in))
        self._model_name = ""
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        counter = partial(_counter, self.registry)
        self.requests = counter("requests", "completions ended, by outcome", "outcome", OUTCOMES)
        self.refusals = counter("refusals", "HTTP requests answered with an error, but failed completions", "code")
        self.failures = counter("request_failures", "completions failed, by the code that clients see", "code")
        self.aborts = counter("aborts", "completions that their clients left, by phase", "phase", _names(Phase))
        self.replays = counter("replays", "completions started again, by reason", "reason", REPLAYS)
        self.handoff_failures = counter("handoff_failures", "handoffs lost, by the way of the blocks", "transport")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens of accepted completions")
        self.cached_tokens = counter(
            "cached_prompt_tokens", "prompt tokens that were not computed, as their KV was there"
        )
        self.expected_tokens = counter(
            "expected_cached_prompt_tokens", "the same, as they were expected where there are several pools"
        )
        self.stale_tokens = counter(
            "stale_tokens", "tokens dropped: of a dead worker, an old attempt or an ended completion"
        )

    def _make_histograms(self) -> None:
        histogram = partial(_histogram, self.registry)
        self.ttft_s = histogram("time_to_first_token_seconds", "request to first token", TTFT_BOUNDS_S)
        self.tpot_s = histogram(
            "time_per_output_token_seconds", "of a finished completion: first to last token, by the tokens behind the "
            "first", ITL_BOUNDS_S,
        )  # fmt: skip
        self.e2e_s = histogram("e2e_request_latency_seconds", "request to last token", PHASE_BOUNDS_S)
        self.phase_s = histogram("request_phase_seconds", "finished completions, by phase", PHASE_BOUNDS_S, "phase")
        self.inference_s = histogram(
            "request_inference_seconds", "of a finished completion: all but waiting in the router", PHASE_BOUNDS_S
        )
        self.output_s = histogram(
            "request_output_seconds", "of a finished completion: first to last token", PHASE_BOUNDS_S
        )
        self.handoff_s = histogram(
            "handoff_seconds", "first token to the first of a decode step, by the way of the blocks", HANDOFF_BOUNDS_S,
            "transport",
        )  # fmt: skip
        self.prompt_lengths = histogram("request_prompt_tokens", "of finished completions", TOKEN_BOUNDS)
        self.output_lengths = histogram("request_generation_tokens", "of finished completions", TOKEN_BOUNDS)

    # --- as things happen -----------------------------------------------------------------------

    def enter(self, completion: Completion, phase: Phase, now_s: float) -> None:
        """Count the move of a completion to the next phase."""
        before = completion.times.phases.current
        passed_s = completion.enter(phase, now_s)
        if before is not None:
            self.num_in[before] -= 1
        self.num_in[phase] += 1
        if before is Phase.HANDOFF and phase is Phase.DECODE:
            self.handoff_s.labels(completion.attempt.transport).observe(passed_s)
            self.handoff_failures.labels(completion.attempt.transport)  # exists from now on, so a rise shows

    def add_token(self, completion: Completion, now_s: float) -> None:
        """Time a token, in order, and record the arrival."""
        self.tokens.num_generated += 1
        times = completion.times
        if times.first_token_s:
            self.tokens.add_gap(now_s - times.last_token_s)
        else:
            times.first_token_s = now_s
            self.ttft_s.observe(now_s - times.submitted_s)
        times.last_token_s = now_s
        if completion.attempt.route is not None:
            completion.attempt.route.decode.outputs.num_tokens += 1

    def count_refusal(self, error: RequestError) -> None:
        """Count an HTTP request answered with an error; a failed completion's error was counted at the failure."""
        if error not in self._counted:
            self.num_refused += 1
            self.refusals.labels(error.code).inc()

    def count_replay(self, completion: Completion, kind: str, reason: str) -> None:
        """Count an attempt given up for another."""
        self.replays.labels(kind).inc()
        self.incidents.add(Kind.REPLAY, reason)
        if kind == HANDOFF_LOST:
            self.handoff_failures.labels(completion.attempt.transport).inc()

    def end(self, completion: Completion, now_s: float, error: RequestError | None = None) -> None:
        """Count a completion in a terminal state."""
        self.requests.labels(completion.output.finish_reason or completion.state.value).inc()
        phase = completion.times.phases.current
        completion.times.phases.enter(None, now_s)
        if phase is not None:
            self.num_in[phase] -= 1
        if completion.state is State.FINISHED:
            self._finish(completion, now_s)
        elif error is not None:
            self._counted.add(error)
            self.num_failed += 1
            self.failures.labels(error.code).inc()
            is_ours = error.status >= 500  # below 500 the message may quote the client
            self.incidents.add(Kind.FAILED, f"{error.code}: {error.message}" if is_ours else error.code)
        elif phase is not None:
            self.aborts.labels(phase.value).inc()

    def _finish(self, completion: Completion, now_s: float) -> None:
        times, num_outputs = completion.times, len(completion.output.token_ids)
        e2e_s, seconds = now_s - times.submitted_s, times.phases.seconds
        self.e2e_s.observe(e2e_s)
        for phase, phase_s in seconds.items():
            self.phase_s.labels(phase.value).observe(phase_s)
        self.inference_s.observe(e2e_s - seconds.get(Phase.QUEUED, 0.0))
        self.prompt_lengths.observe(len(completion.spec.prompt_ids))
        self.output_lengths.observe(num_outputs)
        if num_outputs:
            output_s = times.last_token_s - times.first_token_s
            self.output_s.observe(output_s)
            if num_outputs > 1:
                self.tpot_s.observe(output_s / (num_outputs - 1))

    # --- at a scrape ----------------------------------------------------------------------------

    def describe(self, info: ModelInfo) -> None:
        """Register the families about the model and the program's version."""
        self._model_name = info.name
        self.registry.register(_Description(info))

    def observe_texts(self, counts: Callable[[], TextCounts]) -> None:
        """Register the families about the text cache."""
        self.registry.register(_TextCollector(counts))

    def families(self) -> Iterator[Metric]:
        """Yield all families with present values, each followed by copies under vLLM's names."""
        for family in self.registry.collect():
            yield family
            yield from aliases(family, self._model_name)


def _counter(registry: CollectorRegistry, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
    counter = Counter(f"baton_{name}", text, [label] if label else [], registry=registry)
    for value in values:
        counter.labels(value)
    return counter


def _histogram(
    registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float], label: str = ""
) -> Histogram:
    return Histogram(f"baton_{name}", text, [label] if label else [], buckets=bounds, registry=registry)


class _Tokens(Collector):
    """Values fed by every token, from the event loop only."""

    def __init__(self) -> None:
        self.num_generated = 0
        self.num_gaps = [0] * (len(ITL_BOUNDS_S) + 1)  # by bucket, the last without a bound
        self._sum_s = 0.0

    def add_gap(self, gap_s: float) -> None:
        """Count the time between two tokens of a completion."""
        self.num_gaps[bisect_left(ITL_BOUNDS_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("baton_generation_tokens", "tokens received in order", value=self.num_generated)
        family = HistogramMetricFamily("baton_inter_token_latency_seconds", "token to token")
        family.add_metric([], buckets_of(ITL_BOUNDS_S, self.num_gaps), self._sum_s)
        yield family


def buckets_of(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative buckets for a histogram family; `counts` are by bucket, the last without a bound."""
    names = [*map(number, map(float, bounds)), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


class _Phases(Collector):
    def __init__(self, num_in: Tally[Phase]) -> None:
        self._num_in = num_in

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("baton_requests_in_phase", "completions by phase", labels=["phase"])
        for phase in Phase:
            family.add_metric([phase.value], self._num_in[phase])
        yield family


class _Description(Collector):
    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    def collect(self) -> Iterator[Metric]:
        info = self._info
        build = GaugeMetricFamily("baton_build_info", "the program", labels=["version"])
        build.add_metric([VERSION], 1)
        model = GaugeMetricFamily("baton_model_info", "what is served", labels=["model", "fingerprint", "tokenizer"])
        model.add_metric([info.name, info.model_fingerprint, info.tokenizer_fingerprint], 1)
        length = GaugeMetricFamily("baton_model_context_tokens", "of the longest text", value=info.max_model_len)
        yield from (build, model, length)


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


def _names(phases: Iterable[Phase]) -> list[str]:
    return [phase.value for phase in phases]
