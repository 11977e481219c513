"""Spans as a collector gets them, and that nobody notices one that is not there."""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest

from common.base.errors import ConfigError
from common.settings.config import Config, RouterSection
from common.settings.options import from_tables
from router.api.telemetry import TELEMETRY, make_telemetry
from tests.router.conftest import Cluster, StartCluster
from tests.support.fakes import FakeDecode

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "a prompt that nobody else shall read"
THREADS_END_S = 30.0
Span = dict[str, Any]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is there, and sends soon. Its threads end with the test, because they use `random` amid what others draw."""
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the otel extra is not installed")
    monkeypatch.setattr("router.api.otel.SEND_EVERY_MS", 20)
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if "otel" in thread.name.lower():
            thread.join(THREADS_END_S)
            assert not thread.is_alive(), thread.name


class Collector:
    """Keeps the spans that are posted to it."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Span] = []
        self.bodies = b""
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies += body
                collector.paths.add(self.path)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    assert value_of(resource.resource.attributes, "service.name") == "baton"
                    collector.spans += [shown(span) for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span["name"] == name]


def value_of(attributes: Any, key: str) -> Any:
    return next(unwrapped(each.value) for each in attributes if each.key == key)


def unwrapped(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [unwrapped(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def shown(span: Any) -> Span:
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "state": span.trace_state,
        "begin": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "error": span.status.code == 2,
        **{each.key: unwrapped(each.value) for each in span.attributes},
    }


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


async def started(start_cluster: StartCluster, url: str, **router: Any) -> Cluster:
    cluster = await start_cluster(otlp_endpoint=url, **router)
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    return cluster


async def asked(cluster: Cluster, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
    """The status and the body of a completion's response."""
    body = {"prompt": SECRET, "max_tokens": 4, "ignore_eos": True, "stop": ["shall not be told"]} | fields
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response,
    ):
        return response.status, await (response.text() if fields.get("stream") else response.json())


async def server_spans(cluster: Cluster, collector: Collector, count: int = 1) -> list[Span]:
    await cluster.until(lambda: len(collector.named("POST /v1/completions")) >= count, "the spans")
    return collector.named("POST /v1/completions")


async def test_a_request_is_a_span_of_its_callers_trace_with_one_for_each_phase(
    start_cluster: StartCluster, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster = await started(start_cluster, collector.url)
    headers = {"traceparent": PARENT, "tracestate": "vendor=x", "X-Request-Id": "mine"}
    status, body = await asked(cluster, headers, temperature=0.5, top_p=0.9, seed=1)
    assert status == 200
    [span] = await server_spans(cluster, collector)
    assert (span["trace"], span["parent"], span["state"]) == (TRACE_ID, PARENT_ID, "vendor=x")
    told = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "http.request.header.x-request-id": ["mine"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": body["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "error": False,
    }
    assert {key: span[key] for key in told} == told
    parts = [each for each in collector.spans if each["parent"] == span["id"]]
    parts.sort(key=lambda each: each["begin"])
    assert [each["name"] for each in parts] == ["receive", "tokenize", "queued", "prefill", "handoff", "decode"]
    assert all(span["begin"] - 1e6 <= each["begin"] <= each["end"] <= span["end"] + 1e6 for each in parts)
    assert {each["trace"] for each in parts} == {TRACE_ID}
    [logged] = [record.fields for record in caplog.records if hasattr(record, "fields")]
    for each in parts[2:]:
        assert (each["end"] - each["begin"]) / 1e6 == pytest.approx(logged[f"{each['name']}_ms"], abs=0.002)
    assert (parts[3]["baton.prefill_worker"], parts[3]["baton.decode_worker"]) == ("prefill-0", "decode-0")
    assert collector.paths == {"/v1/traces"}
    for secret in (SECRET, "shall not be told", body["choices"][0]["text"]):
        assert secret.encode() not in collector.bodies


@pytest.mark.medium
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{'0' * 32}-{PARENT_ID}-01"},
        {"traceparent": f"00-{TRACE_ID}-{'0' * 16}-01"},
        {"traceparent": f"ff-{TRACE_ID}-{PARENT_ID}-01"},
        {"traceparent": f"00-{TRACE_ID.upper()}-{PARENT_ID}-01"},
        {"traceparent": f"{PARENT}-more"},
        {"traceparent": "0" * 5000},
    ],
    ids=["none", "nonsense", "no trace", "no span", "version ff", "upper case", "too much", "long"],
)
async def test_without_a_sound_traceparent_a_new_trace_begins(
    headers: dict[str, str], start_cluster: StartCluster, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await started(start_cluster, collector.url)
    status, _ = await asked(cluster, headers | {"tracestate": "=,=broken"})
    assert status == 200
    [span] = await server_spans(cluster, collector)
    assert span["parent"] == ""
    assert span["trace"] not in ("0" * 32, TRACE_ID)
    assert "broken" not in caplog.text


async def test_a_tracestate_that_is_malformed_is_left_aside_and_not_logged(
    start_cluster: StartCluster, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await started(start_cluster, collector.url)
    assert (await asked(cluster, {"traceparent": PARENT, "tracestate": "=,=broken"}))[0] == 200
    [span] = await server_spans(cluster, collector)
    assert (span["parent"], span["state"]) == (PARENT_ID, "")
    assert "broken" not in caplog.text


async def test_a_caller_that_does_not_sample_gets_no_span(start_cluster: StartCluster, collector: Collector) -> None:
    cluster = await started(start_cluster, collector.url)
    assert (await asked(cluster, {"traceparent": f"{PARENT[:-2]}00"}))[0] == 200
    assert (await asked(cluster))[0] == 200
    [span] = await server_spans(cluster, collector)
    assert span["parent"] == ""


async def test_choices_streams_and_errors_are_told(start_cluster: StartCluster, collector: Collector) -> None:
    cluster = await started(start_cluster, f"{collector.url}/v1/traces")
    status, text = await asked(cluster, n=2, stream=True)
    assert (status, "[DONE]" in text) == (200, True)
    assert (await asked(cluster, n=0))[0] == 400
    both, wrong = await server_spans(cluster, collector, 2)
    assert (both["gen_ai.request.choice.count"], both["gen_ai.usage.output_tokens"]) == (2, 8)
    assert both["gen_ai.response.time_to_first_chunk"] > 0
    decoded = [each for each in collector.named("decode") if each["parent"] == both["id"]]
    assert {each["baton.choice"] for each in decoded} == {0, 1}
    assert (wrong["http.response.status_code"], wrong["error.type"], wrong["error"]) == (400, "invalid_value", True)


async def test_a_replay_and_a_client_that_leaves_are_told(start_cluster: StartCluster, collector: Collector) -> None:
    cluster = await started(start_cluster, collector.url)
    [decode] = [worker for worker in cluster.workers if isinstance(worker, FakeDecode)]
    decode.step_s = 0.05
    asking = asyncio.create_task(asked(cluster, max_tokens=200))
    await cluster.until(lambda: any(len(c.output.token_ids) > 2 for c in cluster.service.dispatcher.active), "outputs")
    other = cluster.decode("decode-1", step_s=0.05)
    await cluster.until_paths(2)
    await asyncio.to_thread(decode.kill)
    dispatcher = cluster.service.dispatcher
    await cluster.until(
        lambda: any(c.attempt.number == 1 and len(c.output.token_ids) > 9 for c in dispatcher.active), "a replay"
    )
    asking.cancel()
    [span] = await server_spans(cluster, collector)
    assert (span["error.type"], span["http.response.status_code"]) == ("client_closed_request", 499)
    decoded = sorted((each["baton.attempt"], each["baton.decode_worker"]) for each in collector.named("decode"))
    assert decoded == [(0, "decode-0"), (1, other.worker_id)]


@pytest.mark.medium
@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
async def test_a_collector_that_does_not_answer_costs_nobody_anything(
    hangs: bool, start_cluster: StartCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.otel.SEND_TIMEOUT_S", 1.0)
    monkeypatch.setattr("router.api.otel.CLOSE_S", 0.1)
    with socket.socket() as port, caplog.at_level(logging.WARNING):
        port.bind(("127.0.0.1", 0))
        if hangs:
            port.listen()
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        cluster = await started(start_cluster, url)
        for _ in range(3):
            assert (await asked(cluster))[0] == 200
        await asyncio.to_thread(cluster.runner.app[TELEMETRY].close)
        await cluster.until(lambda: "takes no spans" in caplog.text, "a line of the log")
    assert caplog.text.count(url) == 1, "and no other"


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://x", "http://"])
def test_what_is_no_url_is_a_wrong_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.otlp_endpoint = .*a URL such as"):
        from_tables(Config, {"router": {"otlp_endpoint": url}})


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "router.api.otel", raising=False)
    with pytest.raises(ConfigError, match=r"needs the otel extra: pip install -e"):
        make_telemetry(RouterSection(otlp_endpoint="http://127.0.0.1:4318"), "m")
