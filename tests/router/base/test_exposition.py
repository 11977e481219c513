"""`GET /metrics` as Prometheus reads it: its rules, vLLM's names, whose series there are."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from router.base.exposition import exposition
from tests.router.conftest import Client, Cluster
from tests.support.fakes import FakeWorker

ABBREVIATED = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "m", "h", "d"}
OTHER_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes", "gigabytes", "percent"}
TYPES = {"gauge", "counter", "histogram", "summary"}
MADE_UP = "made-up-by-a-client"

VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "time_per_output_token_seconds_bucket", "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum", "request_inference_time_seconds_sum", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum", "iteration_tokens_total_bucket",
}  # fmt: skip
"""What dashboards and autoscalers made for vLLM ask for."""


async def scraped(cluster: Cluster) -> str:
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return await response.text()


labelled = st.lists(st.tuples(st.text(max_size=5), st.floats(allow_nan=False)), max_size=5)


@pytest.mark.medium
@given(labelled, st.text('\\\n"x ', max_size=9))
def test_whatever_stands_in_a_label_is_read_again(samples: list[tuple[str, float]], help_text: str) -> None:
    told = GaugeMetricFamily("baton_told", help_text, labels=["worker"])
    for value, number in samples:
        told.add_metric([value], number)
    text = asyncio.run(exposition([told, told])).decode()
    families = [family for family in text_string_to_metric_families(text) if family.samples]
    read = [(sample.labels["worker"], sample.value) for family in families for sample in family.samples]
    assert read == samples * 2


def ours(text: str) -> str:
    """Without the names that vLLM chose, which Prometheus's rules would forbid."""
    return "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)


def broken_rules(family: Metric) -> Iterator[str]:
    """What `promtool check metrics` would say, and more."""
    words = family.name.split("_")
    names = {sample.name for sample in family.samples}
    if not family.documentation or family.type not in TYPES:
        yield "no help or no type"
    if not re.fullmatch(r"baton(_[a-z0-9]+)+", family.name):
        yield "not snake_case"
    if ABBREVIATED & set(words) or OTHER_UNITS & set(words):
        yield "not in base units"
    if TYPES & set(words):
        yield "its type in its name"
    if family.type == "counter" and not names <= {f"{family.name}_total", f"{family.name}_created"}:
        yield "a counter that is not called a total"
    if family.type != "counter" and words[-1] in ("total", "count", "sum", "bucket"):
        yield "called a counter"
    labels = {name for sample in family.samples for name in sample.labels}
    if not all(re.fullmatch("[a-z_]+", name) for name in labels) or (family.type != "histogram" and "le" in labels):
        yield "a label of no good name"
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
    if len(set(series)) != len(series):
        yield "a series twice"


async def test_metrics_keep_prometheus_s_rules(client: Client, cluster: Cluster) -> None:
    await client.completions.create(model="tiny", prompt="the quick", n=2, max_tokens=4)
    text = await scraped(cluster)
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("baton_")]
    assert len(families) > 50
    assert {family.name: found for family in families if (found := list(broken_rules(family)))} == {}
    for name in ("baton_time_to_first_token_seconds", "baton_worker_step_seconds"):
        assert f"{name}_bucket" in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
async def test_promtool_has_nothing_to_say(client: Client, cluster: Cluster) -> None:
    await client.completions.create(model="tiny", prompt="the quick", max_tokens=4)
    text = ours(await scraped(cluster))
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


async def test_vllm_s_dashboards_and_autoscalers_find_their_names(client: Client, cluster: Cluster) -> None:
    await client.completions.create(model="tiny", prompt="the quick", max_tokens=4, extra_body={"ignore_eos": True})
    samples = [
        sample for family in text_string_to_metric_families(await scraped(cluster)) for sample in family.samples
        if sample.name.startswith("vllm:")
    ]  # fmt: skip
    assert {f"vllm:{name}" for name in VLLM} <= {sample.name for sample in samples}
    assert {sample.labels["model_name"] for sample in samples} == {"tiny"}
    values = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for sample in samples if "le" not in sample.labels and sample.labels["engine"] == "0"
    }  # fmt: skip
    assert values["vllm:request_success_total", "length"] == 1
    assert values["vllm:request_success_total", "abort"] == values["vllm:request_success_total", "error"] == 0
    assert values["vllm:generation_tokens_total", None] == 4
    assert values["vllm:num_requests_waiting", None] == values["vllm:num_preemptions_total", None] == 0
    assert values["vllm:time_to_first_token_seconds_count", None] == 1
    assert values["vllm:inter_token_latency_seconds_count", None] == 3
    assert values["vllm:prefix_cache_queries_total", None] == values["vllm:prompt_tokens_total", None] > 0


async def test_what_is_counted_of_a_worker_is_there_as_long_as_it_is(client: Client, cluster: Cluster) -> None:
    prefill, decode = cluster.workers
    for seconds in (0.004, 0.004, 0.02, 100.0):
        decode.steps.note(seconds, 24, 3)
    member = cluster.service.pool.find(decode.worker_id)
    assert member is not None
    await cluster.until(lambda: member.beat and member.beat.steps.num_sequences == 12, "its next beat")
    text = await scraped(cluster)
    assert named(text, "step_seconds_bucket", decode, le="0.005") == 2
    assert named(text, "step_seconds_bucket", decode, le="0.025") == 3
    assert named(text, "step_seconds_count", decode) == named(text, "step_tokens_count", decode) == 4
    assert named(text, "step_tokens_sum", decode) == 96
    assert named(text, "step_sequences_total", decode) == 12
    decode.kill()
    await cluster.until(lambda: cluster.service.pool.find(decode.worker_id) is None, "the end of the decode worker")
    text = await scraped(cluster)
    assert f'"{decode.worker_id}"' not in text
    assert f'"{prefill.worker_id}"' in text


def named(text: str, name: str, worker: FakeWorker, **labels: str) -> float:
    wanted = {"worker": worker.worker_id, "role": worker.role.name.lower()} | labels
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next(s.value for s in samples if s.name == f"baton_worker_{name}" and s.labels == wanted)


async def test_nothing_that_a_client_says_is_a_label(client: Client, cluster: Cluster) -> None:
    body = {"prompt": MADE_UP, "user": MADE_UP, "model": MADE_UP, "stop": [MADE_UP], "cache_salt": MADE_UP}
    headers = {"X-Request-Id": MADE_UP}
    async with aiohttp.ClientSession(cluster.url, headers=headers) as session:
        for fields in (body, body | {"model": "tiny"}, {MADE_UP: 1}):
            async with session.post("/v1/completions", json=fields) as response:
                await response.read()
        async with session.get(f"/{MADE_UP}") as response:
            assert response.status == 404
    assert MADE_UP not in await scraped(cluster)


@pytest.mark.medium
async def test_status_pages_answer_head_without_a_body(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as session:
        for path in ("/metrics", "/health", "/ping", "/live", "/load", "/version", "/v1/models", "/openapi.json"):
            async with session.head(path) as response:
                assert (response.status, await response.read()) == (200, b""), path
