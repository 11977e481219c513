"""The HTTP endpoints: each checks its request, and writes what the mailbox brings.

A streamed response begins with its first token, so that an error before it keeps its HTTP status.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from common.errors import RequestError
from router import health, openai_api
from router.api_keys import OWNER
from router.door import refuse_surplus
from router.job import Job, make_job, submitted
from router.request_state import Delivery
from router.responses import DONE, ChunkWriter, completion_body, error_body, event
from router.service import Service

SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)

SLOW_CLIENT_S = 60.0
"""Time beyond router.request_timeout_s that a client may take to read its response."""
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

routes = web.RouteTableDef()


@routes.post("/v1/completions")
async def post_completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's completions."""
    service = request.app[SERVICE]
    _check_content_type(request)
    refuse_surplus(request)
    service.dispatcher.admit()  # nobody's body is read for nothing
    with service.bodies.hold() as body:
        await body.receive(request)
        checked = await service.reader.read(body.pieces, service.max_model_len)
    if request[OWNER]:
        checked = replace(checked, client=request[OWNER])  # a user's name is easily invented
    job = make_job(service, checked, request[REQUEST_ID])
    await asyncio.sleep(0)  # thousands of completions took a while
    try:
        async with asyncio.timeout(service.config.router.request_timeout_s + SLOW_CLIENT_S):
            with submitted(service.dispatcher, job):
                return await (_stream(request, job) if job.options.stream else _whole(job))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"{request[REQUEST_ID]}: the client reads too slowly") from None


@routes.get("/v1/models")
async def get_models(request: web.Request) -> web.Response:
    """The one model."""
    return web.json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


@routes.get("/v1/models/{model_id:.+}")
async def get_model(request: web.Request) -> web.Response:
    """The one model, by name."""
    service = request.app[SERVICE]
    openai_api.check_model(request.match_info["model_id"], service.tokenizer.info.name)
    return web.json_response(_model(service))


@routes.get("/health")
async def get_health(request: web.Request) -> web.Response:
    """200 when requests can be served, else 503; the body says what is missing."""
    service = request.app[SERVICE]
    report = health.report(service.pool, draining=service.dispatcher.draining, now_s=time.monotonic())
    return web.json_response(report, status=200 if report["status"] == "ok" else 503)


@routes.get("/live")
async def get_live(_: web.Request) -> web.Response:
    """200 while the event loop turns, whatever the workers do."""
    return web.json_response({"status": "ok"})


@routes.get("/metrics")
async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus exposition."""
    return web.Response(body=request.app[SERVICE].metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


OPEN_TO_ALL = (get_live, get_health, get_metrics)
"""What needs no API key."""


async def _whole(job: Job) -> web.Response:
    texts: list[list[str]] = [[] for _ in job.completions]
    num_open = len(job.completions)
    while num_open:
        for delivery in await job.mailbox.take():
            if delivery.error is not None:
                raise delivery.error
            texts[delivery.choice].append(delivery.text)
            num_open -= delivery.finish_reason is not None
    body = completion_body(job.head, job.options, list(map("".join, texts)), job.completions, job.usage)
    return web.json_response(body)


async def _stream(request: web.Request, job: Job) -> web.StreamResponse:
    deliveries = await job.mailbox.take()
    if deliveries[0].error is not None:
        raise deliveries[0].error
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    writers = [ChunkWriter(job.head, job.options, completion) for completion in job.completions]
    num_open = len(writers)
    while True:
        await response.write(b"".join(_events(writers, deliveries)))
        num_open -= sum(delivery.finish_reason is not None for delivery in deliveries)
        if num_open == 0 or any(delivery.error is not None for delivery in deliveries):
            break
        deliveries = await job.mailbox.take()
    usage = (
        event({**job.head, "choices": [], "usage": job.usage}) if job.options.include_usage and num_open == 0 else b""
    )
    await response.write(usage + DONE)
    await response.write_eof()
    return response


def _events(writers: Sequence[ChunkWriter], deliveries: list[Delivery]) -> list[bytes]:
    """An event for each delivery; texts of one choice are one event when the client was too slow for each."""
    if len(deliveries) > len(writers):
        deliveries = _merged(deliveries)
    return [
        event(error_body(delivery.error)) if delivery.error is not None else writers[delivery.choice].chunk(delivery)
        for delivery in deliveries
    ]


def _merged(deliveries: list[Delivery]) -> list[Delivery]:
    last: dict[int, Delivery] = {}
    for delivery in deliveries:
        before = last.get(delivery.choice)
        last[delivery.choice] = delivery._replace(text=before.text + delivery.text) if before else delivery
    return list(last.values())


def _check_content_type(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise RequestError(
            f"content type {request.content_type[:80]!r}: send JSON with Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )


def _model(service: Service) -> dict[str, Any]:
    name = service.tokenizer.info.name
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "baton",
        "root": name,
        "max_model_len": service.max_model_len,
    }
