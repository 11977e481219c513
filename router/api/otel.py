"""OpenTelemetry spans: a span for an HTTP request, and inside a span for each phase of each choice.

The caller's trace continues (W3C `traceparent` and `tracestate`), or a new trace begins. Attribute names follow
OpenTelemetry's conventions for HTTP and generative AI; all others begin with `baton.`. Spans contain no text of a
request or response. A thread sends spans, and drops spans beyond the room of its queue.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aiohttp import web
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.base.version import VERSION
from common.settings.config import RouterSection
from router.answers.request_choices import Job
from router.api.http_request import CLIENT_REQUEST_ID, HEADER
from router.api.telemetry import NO_SPAN, OPERATIONS, RequestSpan, Telemetry
from router.dispatch.completion.journey import Arrival, End, Leg, Watcher
from router.requests.completion_api import CompletionRequest

logger = logging.getLogger(__name__)

PATH = "/v1/traces"
"""Default path of a collector, for a URL without a path."""
MAX_QUEUED_SPANS, MAX_BATCH_SPANS = 8192, 512
SEND_EVERY_MS, SEND_TIMEOUT_S = 1000, 5.0
CLOSE_S = 2.0
SILENCE_S = 60.0
"""Time between two warnings about lost spans."""
QUIET = ("trace", "exporter")
"""Library loggers of clients' input and each attempt to reach a collector."""
PROVIDER = "baton"
CONTEXT = ("traceparent", "tracestate")


class OtelTelemetry(Telemetry):
    """Maker of spans sent in the background; requests never wait for the collector."""

    def __init__(self, section: RouterSection, model_name: str) -> None:
        for name in QUIET:
            logging.getLogger(f"opentelemetry.{name}").setLevel(logging.CRITICAL)
        self._model_name, self._address = model_name, (section.host, section.port)
        resource = Resource.create({"service.name": PROVIDER, "service.version": VERSION})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _Exporter(with_path(section.otlp_endpoint))
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=SEND_EVERY_MS,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
        provider.add_span_processor(self._processor)
        self._tracer, self._context = provider.get_tracer(PROVIDER, VERSION), TraceContextTextMapPropagator()
        logger.info("spans go to %s", shown(section.otlp_endpoint))

    def begin(self, request: web.Request) -> RequestSpan:
        route = request.path.rstrip("/")
        attributes = {
            "http.request.method": request.method,
            "http.route": route,
            "url.path": request.path,
            "server.address": self._address[0],
            "server.port": self._address[1],
            "gen_ai.operation.name": OPERATIONS[route],
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model_name,
        }
        if request[CLIENT_REQUEST_ID]:
            attributes[f"http.request.header.{HEADER.lower()}"] = [request[CLIENT_REQUEST_ID]]
        span = self._tracer.start_span(
            f"{request.method} {route}",
            context=self._context.extract(_caller(request)),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        )
        return OtelSpan(self._tracer, span, self._model_name) if span.is_recording() else NO_SPAN

    def close(self) -> None:
        """Send remaining spans, for `CLOSE_S` at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="otel", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class OtelSpan(RequestSpan):
    """The recorded span of an HTTP request; a caller's trace decides about recording."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, model_name: str) -> None:
        self._tracer, self._span, self._model_name = tracer, span, model_name
        self._around = trace.set_span_in_context(span)
        self._lead_s = time.time() - time.monotonic()  # from the dispatcher's clock to Unix time
        self._num_choices, self._received_s = 1, 0.0

    def describe(self, request: CompletionRequest, arrival: Arrival) -> None:
        sampling = request.sampling
        self._num_choices, self._received_s = request.n * len(request.prompts), arrival.received_s
        told = {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.choice.count": request.n if request.n > 1 else None,
            "gen_ai.request.stream": request.response.stream,
        }
        self._tell(told)
        self.add("receive", arrival.received_s, arrival.body_s, {})
        self.add("tokenize", arrival.body_s, arrival.read_s, {})

    def watch(self, index: int) -> Watcher:
        return _Choice(self, index if self._num_choices > 1 else None, self._received_s)

    def answer(self, job: Job) -> None:
        usage = job.usage
        self._tell(
            {
                "gen_ai.response.id": job.head["id"],
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.finish_reasons": [choice.outcome for choice in job.choices],
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            }
        )

    def first_token(self, seconds: float) -> None:
        """Note the seconds from the request to the first choice's first token."""
        self._tell({"gen_ai.response.time_to_first_chunk": seconds})

    def fail(self, error_type: str) -> None:
        self._tell({"error.type": error_type})
        self._span.set_status(trace.Status(trace.StatusCode.ERROR))

    def end(self, status: int) -> None:
        self._tell({"http.response.status_code": status})
        self._span.end()

    def add(self, name: str, begin_s: float, end_s: float, attributes: Mapping[str, object]) -> None:
        """Add a child span, timed on the dispatcher's clock."""
        begin_ns = self._unix_ns(begin_s)
        part = self._tracer.start_span(name, context=self._around, attributes=attributes, start_time=begin_ns)
        part.end(self._unix_ns(end_s))

    def _tell(self, attributes: Mapping[str, object]) -> None:
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def _unix_ns(self, clock_s: float) -> int:
        return round((clock_s + self._lead_s) * 1e9)


class _Choice:
    """Watcher of a completion; reports phases as child spans of the request."""

    def __init__(self, span: OtelSpan, index: int | None, received_s: float) -> None:
        self._span, self._index, self._received_s = span, index, received_s

    def left(self, leg: Leg, end_s: float) -> None:
        attributes: dict[str, object] = {"baton.attempt": leg.attempt}
        if self._index is not None:
            attributes["baton.choice"] = self._index
        if leg.route is not None:
            attributes |= {"baton.prefill_worker": leg.route.prefill.id, "baton.decode_worker": leg.route.decode.id}
        self._span.add(leg.phase.value, leg.begin_s, end_s, attributes)

    def ended(self, end: End) -> None:
        if end.facts["error"]:
            self._span.fail(end.facts["error"])
        ttft_ms, is_first = end.facts["ttft_ms"], not self._index
        if ttft_ms is not None and is_first:
            self._span.first_token((ttft_ms + end.facts["read_ms"]) / 1e3)


class _Exporter:
    """Sender of batches; logs the number of lost spans now and then."""

    def __init__(self, endpoint: str) -> None:
        self._shown = shown(endpoint)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
        self._num_lost, self._silent_until_s = 0, 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            if time.monotonic() >= self._silent_until_s:
                self._silent_until_s = time.monotonic() + SILENCE_S
                logger.warning("%s takes no spans: %d are lost so far", self._shown, self._num_lost)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def with_path(endpoint: str) -> str:
    """Return the URL for posting spans."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}{PATH}"


def shown(endpoint: str) -> str:
    """Return the URL for the log, without credentials, path and query."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _caller(request: web.Request) -> dict[str, str]:
    """Return the caller's trace headers, if exactly one `traceparent` is present.

    The library ignores malformed values.
    """
    told = {name: request.headers.getall(name, []) for name in CONTEXT}
    if len(told["traceparent"]) != 1:
        return {}
    return {name: ",".join(values) for name, values in told.items() if values}
