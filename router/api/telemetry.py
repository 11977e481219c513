"""Spans of HTTP requests for OpenTelemetry, whether a collector is named or not: without one they keep nothing.

What needs the library is in `otel`, which nothing imports where no collector is named.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from common.base.errors import ConfigError, RequestError
from common.settings.config import RouterSection
from router.answers.request_choices import Job
from router.dispatch.journey import Arrival, Watcher
from router.requests.completion_api import CompletionRequest

TRACED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
GONE, GONE_STATUS = "client_closed_request", 499
INSTALL = 'pip install -e ".[otel]" where the sources are'


class RequestSpan:
    """That of one HTTP request; this one keeps nothing."""

    def describe(self, request: CompletionRequest, arrival: Arrival) -> None:
        """What is asked for, and how it came; no text of it."""

    def watch(self, index: int) -> Watcher | None:
        """Of the choice of that index."""

    def answer(self, job: Job) -> None:
        """What it has become, once it is over."""

    def fail(self, error_type: str) -> None:
        """It went wrong."""

    def end(self, status: int) -> None:
        """It was answered with that HTTP status."""


class Telemetry:
    """Makes spans; this one none that keeps anything."""

    def begin(self, request: web.Request) -> RequestSpan:
        return NO_SPAN

    def close(self) -> None:
        """Send what is left, but not for long."""


NO_SPAN = RequestSpan()
SPAN = web.RequestKey("span", RequestSpan)
TELEMETRY = web.AppKey("telemetry", Telemetry)


def make_telemetry(section: RouterSection, model_name: str) -> Telemetry:
    """What is asked for; raises ConfigError where the library is not installed."""
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
    """Around requests that have one: those that may ask."""
    request[SPAN] = NO_SPAN
    if request.path.rstrip("/") not in TRACED:
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
        span.fail(GONE)
        status = GONE_STATUS
        raise
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.end(status)
