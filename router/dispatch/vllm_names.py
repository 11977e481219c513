"""vLLM's names for the router's metrics, for dashboards and autoscalers made for vLLM.

Renamed families stand beside Baton's own, with vLLM's labels and values of equal meaning. Values describe a completion
from the router's queue to the last token. The whole system is vLLM's engine "0"; for metrics of steps each worker is an
engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

ENGINE = "0"


@dataclass(frozen=True, slots=True)
class Alias:
    """A vLLM family that repeats a family of Baton.

    Args:
        name: vLLM's name, without a counter's ending.
        only: label and value of the samples chosen; the label is dropped.
        label: Baton's label, vLLM's label, and vLLM's values by Baton's; other samples are left out.
    """

    name: str
    only: tuple[str, str] | None = None
    label: tuple[str, str, Mapping[str, str]] | None = None
    engine_label: str = ""  # Baton's label that names the engine

    def labels(self, ours: Mapping[str, str]) -> dict[str, str] | None:
        """Return vLLM's labels of a sample, by Baton's labels; None if vLLM has no such sample."""
        engine = ours[self.engine_label] if self.engine_label else ENGINE
        theirs = {"engine": engine} | ({"le": ours["le"]} if "le" in ours else {})
        if self.only is not None and ours.get(self.only[0]) != self.only[1]:
            return None
        if self.label is None:
            return theirs
        our_label, their_label, values = self.label
        value = values.get(ours.get(our_label, ""))
        return None if value is None else theirs | {their_label: value}


FINISH_REASONS = {"stop": "stop", "length": "length", "aborted": "abort", "failed": "error"}
ALIASES: dict[str, tuple[Alias, ...]] = {
    "requests_running": (Alias("num_requests_running"),),
    "requests_queued": (Alias("num_requests_waiting"),),
    "kv_usage_ratio": (Alias("kv_cache_usage_perc"),),
    "prompt_tokens": (Alias("prompt_tokens"), Alias("prefix_cache_queries")),
    "cached_prompt_tokens": (Alias("prefix_cache_hits"), Alias("prompt_tokens_cached")),
    "generation_tokens": (Alias("generation_tokens"),),
    "requests": (Alias("request_success", label=("outcome", "finished_reason", FINISH_REASONS)),),
    "replays": (Alias("num_preemptions", only=("reason", "preempted")),),
    "time_to_first_token_seconds": (Alias("time_to_first_token_seconds"),),
    "inter_token_latency_seconds": (Alias("inter_token_latency_seconds"), Alias("time_per_output_token_seconds")),
    "time_per_output_token_seconds": (Alias("request_time_per_output_token_seconds"),),
    "e2e_request_latency_seconds": (Alias("e2e_request_latency_seconds"),),
    "request_phase_seconds": (
        Alias("request_queue_time_seconds", only=("phase", "queued")),
        Alias("request_prefill_time_seconds", only=("phase", "prefill")),
    ),
    "request_inference_seconds": (Alias("request_inference_time_seconds"),),
    "request_output_seconds": (Alias("request_decode_time_seconds"),),
    "request_prompt_tokens": (Alias("request_prompt_tokens"),),
    "request_generation_tokens": (Alias("request_generation_tokens"), Alias("request_max_num_generation_tokens")),
    "worker_step_tokens": (Alias("iteration_tokens_total", engine_label="worker"),),
}
"""vLLM's families by Baton's names; `time_per_output_token_seconds` is the old name of `inter_token_latency_seconds`.
"""


def aliases(family: Metric, model_name: str) -> Iterator[Metric]:
    """Yield copies of `family` under vLLM's names."""
    for alias in ALIASES.get(family.name.removeprefix("baton_"), ()):
        name = f"vllm:{alias.name}"
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = alias.labels(sample.labels)
            if labels is not None and not sample.name.endswith("_created"):
                sample_name = name + sample.name[len(family.name) :]
                renamed.samples.append(Sample(sample_name, {"model_name": model_name} | labels, sample.value))
        yield renamed
