"""Spans of HTTP requests for OpenTelemetry; without a collector, spans keep nothing.

Only `otel` needs the library. `otel` is imported only if a collector is configured.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from common.base.errors import ConfigError, RequestError
from common.settings.config import RouterSection
from router.answers.request_choices import Job
from router.api.http_request import CLIENT_CLOSED_REQUEST
from router.dispatch.completion.journey import Arrival, Watcher
from router.requests.completion_api import CompletionRequest

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
"""Traced paths, and the operation names of OpenTelemetry's conventions."""
INSTALL = 'pip install -e ".[otel]" where the sources are'


class RequestSpan:
    """The span of an HTTP request; the base class keeps nothing."""

    def describe(self, request: CompletionRequest, arrival: Arrival) -> None:
        """Note the parameters and times of arrival, but no text."""

    def watch(self, index: int) -> Watcher | None:
        """Return a watcher for the choice of the index."""

    def answer(self, job: Job) -> None:
        """Note the results, once the request is over."""

    def fail(self, error_type: str) -> None:
        """Note an error."""

    def end(self, status: int) -> None:
        """End the span with the HTTP status of the response."""


class Telemetry:
    """Maker of spans; the base class makes empty spans only."""

    def begin(self, request: web.Request) -> RequestSpan:
        return NO_SPAN

    def close(self) -> None:
        """Send remaining spans, for a short time at most."""


NO_SPAN = RequestSpan()
SPAN = web.RequestKey("span", RequestSpan)
TELEMETRY = web.AppKey("telemetry", Telemetry)


def make_telemetry(section: RouterSection, model_name: str) -> Telemetry:
    """Return the configured telemetry; raise ConfigError if the library is not installed."""
    if not section.otlp_endpoint:
        return Telemetry()
    try:
        from router.api.otel import OtelTelemetry
    except ImportError as error:
        raise ConfigError(
            f"router.otlp_endpoint = {section.otlp_endpoint!r}: {error}; that needs the otel extra: {INSTALL}"
        ) from None
    return OtelTelemetry(section, model_name)


@web.middleware
async def with_span(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Wrap requests for completions, chats and responses in a span."""
    request[SPAN] = NO_SPAN
    if request.path.rstrip("/") not in OPERATIONS:
        return await handler(request)
    request[SPAN] = span = request.app[TELEMETRY].begin(request)
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except RequestError as error:
        span.fail(error.code)
        status = error.status
        raise
    except web.HTTPException as error:
        status = error.status
        raise
    except (asyncio.CancelledError, ConnectionError):
        span.fail("client_closed_request")
        status = CLIENT_CLOSED_REQUEST
        raise
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.end(status)
