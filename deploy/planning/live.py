"""Rates and load of a running system, from its metrics.

Metrics tell means of steps (`baton_worker_step_seconds`, `_tokens`, `_sequences` of GET /metrics). So the known rates
of steps are scaled by two factors, for prompts and for decode. The load is the set of completions finished between two
samples. For workers on a shared GPU, the means include mutual slowdown. The simulator adds slowdown once more, so the
plan is cautious then.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from common.base.errors import ConfigError
from deploy.operate.healthcheck import fetch
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import Rates

DEADLINE_S = 5.0
MAX_BYTES = 64 << 20
FEWEST_STEPS = 20
"""Steps of a role for a meaningful mean."""
FEWEST_REQUESTS = 10
PREFIXES = ("baton_worker_step_", "baton_worker_running", "baton_requests_total", "baton_request_", "baton_kv_usage")

Sample = tuple[str, str]
"""Name of a metric, and the role of its workers or ""."""
Metrics = Mapping[Sample, float]
"""Sums over all workers of a role."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Mean step of all workers of a role."""

    count: float
    ms: float
    tokens: float
    sequences: float


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """Mean of the completions finished between two samples."""

    rate: float  # completions a second
    num_inputs: int
    num_outputs: int


def fetch_metrics(url: str) -> str:
    """Return the text of GET /metrics; raises ConfigError without an answer."""
    try:
        with urlopen(f"{url.rstrip('/')}/metrics", timeout=DEADLINE_S) as response:
            body: bytes = response.read(MAX_BYTES)
    except (OSError, URLError, ValueError) as error:
        raise ConfigError(f"no router answers at {url}: {error}; start one, or leave --from out") from None
    return body.decode("utf-8", "replace")


def devices(url: str) -> set[str]:
    """Return the devices of all workers, without a GPU's number and UUID; raises ConfigError without an answer."""
    try:
        workers = fetch(url.rstrip("/"))["workers"]
        names = [str(each["device"]) for members in workers.values() for each in members]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"no router answers at {url}: {error}; start one, or leave --from out") from None
    return {" ".join(name.split()[1:-1]) or name for name in names}


def parse_metrics(text: str) -> Metrics:
    """Parse the text of /metrics and sum up by role; raises ConfigError for other text."""
    sums: dict[Sample, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIXES):
                    key = sample.name, sample.labels.get("role", "")
                    sums[key] = sums.get(key, 0.0) + sample.value
    except ValueError as error:
        raise ConfigError(f"/metrics says what is no text for Prometheus: {error}") from None
    if not any(name.startswith("baton_") for name, _ in sums):
        raise ConfigError("/metrics has nothing of Baton: name the router, as http://HOST:8000")
    return sums


def steps_of(metrics: Metrics, role: str) -> Steps:
    """Return the mean step since the start of the workers; raises ConfigError after too few steps."""

    def total(name: str) -> float:
        return metrics.get((f"baton_worker_step_{name}", role), 0.0)

    count = total("seconds_count")
    if count < FEWEST_STEPS:
        raise ConfigError(
            f"{count:.0f} steps of {role} workers so far: {FEWEST_STEPS} at least; send requests, with baton bench for "
            "example, or leave --from out"
        )
    return Steps(
        count, total("seconds_sum") * 1e3 / count, total("tokens_sum") / count, total("sequences_total") / count
    )


def calibrated(rates: Rates, prefill: Steps, decode: Steps, mean_tokens: float) -> Rates:
    """Return rates scaled to the measured mean steps.

    Args:
        mean_tokens: mean context of a row, the prompt and half of the reply.
    """
    costs = Costs(rates)
    num_prompts = max(1, round(prefill.sequences))
    length = max(1, round(prefill.tokens / num_prompts))
    prompt_factor = prefill.ms / costs.part.ms([(length, 0)] * num_prompts)
    num_rows = max(1, min(costs.max_rows, round(decode.sequences)))
    step_factor = decode.ms / costs.steps.ms(num_rows, num_rows * mean_tokens)
    how = f"as a running system: prompts x {prompt_factor:.2f}, decode steps x {step_factor:.2f}"
    return replace(
        rates,
        prompts=tuple((tokens, share, ms * prompt_factor) for tokens, share, ms in rates.prompts),
        steps=tuple((rows, context, ms * step_factor, least * step_factor) for rows, context, ms, least in rates.steps),
        origin=(*rates.origin, how),
    )


def load_between(before: Metrics, after: Metrics, seconds: float) -> ObservedLoad:
    """Return the load between two samples; raises ConfigError for too few completions."""

    def grown(name: str) -> float:
        return after.get((name, ""), 0.0) - before.get((name, ""), 0.0)

    count = grown("baton_request_prompt_tokens_count")
    if count < FEWEST_REQUESTS:
        raise ConfigError(
            f"{count:.0f} completions ended within {seconds:g} s: {FEWEST_REQUESTS} at least; raise --watch-s, or say "
            "--rate, --input-len and --output-len"
        )
    inputs, outputs = grown("baton_request_prompt_tokens_sum"), grown("baton_request_generation_tokens_sum")
    return ObservedLoad(count / seconds, max(1, round(inputs / count)), max(1, round(outputs / count)))


def watch(url: str, seconds: float, sleep: Callable[[float], None] = time.sleep) -> tuple[Metrics, ObservedLoad]:
    """Return the metrics after `seconds`, and the load meanwhile."""
    before, begun_s = parse_metrics(fetch_metrics(url)), time.monotonic()
    sleep(seconds)
    after = parse_metrics(fetch_metrics(url))
    return after, load_between(before, after, time.monotonic() - begun_s)
