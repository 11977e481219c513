"""The HTTP endpoints of completions and chats: check a request, and write what the mailbox brings.

A streamed response begins with its first token, so that an error before it keeps its HTTP status, or with a first
comment, if they are wanted (`router.stream_keepalive_s`).
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from common.errors import RequestError
from router.api_keys import OWNER
from router.fronts import CHATS, COMPLETIONS, Front
from router.http_request import CLIENT_REQUEST_ID, REQUEST_ID, SERVICE, received
from router.job import Job, make_job, submitted
from router.journey import Arrival
from router.json_rules import wrong
from router.prompt_shapes import NOTHING
from router.request_state import Delivery, Mailbox
from router.responses import DONE, JSON, ChunkWriter, choice_json, error_body, event
from router.telemetry import SPAN

SLOW_CLIENT_S = 60.0
"""Time beyond router.request_timeout_s that a client may take to read its response."""
COMMENT = b": keep-alive\n\n"
"""Clients skip it; what stands between sees that the stream lives."""
TIMING_HEADER = "X-Baton-Timing"
"""With 1 a client asks what the way of its request was."""
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

routes = web.RouteTableDef()


@routes.post("/v1/completions/")
@routes.post("/v1/completions")
async def post_completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's completions."""
    return await _respond(request, COMPLETIONS)


@routes.post("/v1/chat/completions/")
@routes.post("/v1/chat/completions")
async def post_chat_completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions."""
    return await _respond(request, CHATS)


async def _respond(request: web.Request, front: Front) -> web.StreamResponse:
    job = await _job(request, front)
    service = request.app[SERVICE]
    await asyncio.sleep(0)  # thousands of completions took a while
    for _ in service.dispatcher.find_out(job.completions):
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(service.config.router.request_timeout_s + SLOW_CLIENT_S):
            with submitted(service.dispatcher, job):
                return await (_stream(request, front, job) if job.options.stream else _whole(request, front, job))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"{request[REQUEST_ID]}: the client reads too slowly") from None
    finally:
        request[SPAN].answer(job)


async def _job(request: web.Request, front: Front) -> Job:
    service, received_s = request.app[SERVICE], time.monotonic()
    service.dispatcher.admit()  # nobody's body is read for nothing
    try:
        async with received(request) as body:
            body_s = time.monotonic()
            checked = await service.reader.read(body.pieces, service.max_model_len, front.kind)
        arrival = Arrival(received_s, body_s, time.monotonic())
        _check_priority(checked.priority, service.config.router.min_priority)
        grammar = await service.grammars.grammar(checked.grammar)
        checked = replace(checked, sampling=replace(checked.sampling, grammar=grammar))
        if request[OWNER]:
            checked = replace(checked, client=request[OWNER], owner=request[OWNER])  # a user's name is easily invented
        head = front.head(request[REQUEST_ID], service.tokenizer.info.name, stream=checked.response.stream)
        request[SPAN].describe(checked, arrival)
        return make_job(service, checked, head, request[CLIENT_REQUEST_ID], arrival, request[SPAN].watch)
    except RequestError as error:
        if error.param == "prompt" and error.code != "unknown_field":
            error.param = front.prompt_field
        raise


def _check_priority(priority: int, most_urgent: int) -> None:
    """Raise RequestError for a client that would go before all others, unless the server lets it."""
    if priority < most_urgent:
        raise wrong("priority", priority, f"at least router.min_priority, {most_urgent}: lower goes first")


async def _whole(request: web.Request, front: Front, job: Job) -> web.Response:
    texts: list[list[str]] = [[] for _ in job.completions]
    num_open = len(job.completions)
    while num_open:
        for delivery in await job.mailbox.take():
            if delivery.error is not None:
                raise delivery.error
            texts[delivery.choice].append(delivery.text)
            num_open -= delivery.finish_reason is not None
    choices = []
    for text, completion in zip(texts, job.completions, strict=True):
        choice = front.choice("".join(text), completion, job.options)
        choices.append(choice_json(choice, await job.shaper.parts(completion)))
    listed = ", ".join(choices)
    told = f', "timing": {json.dumps(job.timing)}' if _wants_timing(request) else ""
    body = f'{json.dumps(job.head)[:-1]}, "choices": [{listed}], "usage": {json.dumps(job.usage)}{told}}}'
    return web.Response(text=body, content_type=JSON)


async def _stream(request: web.Request, front: Front, job: Job) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    deliveries = await _next(request, response, job.mailbox)
    if deliveries[0].error is not None and not response.prepared:
        raise deliveries[0].error
    await response.prepare(request)
    writers = [front.writer(job.head, job.options, completion) for completion in job.completions]
    num_open = len(writers)
    while True:
        if job.options.num_echoed_logprobs:
            await _shape_prompts(job, writers, deliveries)
        await response.write(b"".join(_events(writers, deliveries)))
        num_open -= sum(delivery.finish_reason is not None for delivery in deliveries)
        if num_open == 0 or any(delivery.error is not None for delivery in deliveries):
            break
        deliveries = await _next(request, response, job.mailbox)
    await response.write((_last_words(request, job) if num_open == 0 else b"") + DONE)
    await response.write_eof()
    return response


def _last_words(request: web.Request, job: Job) -> bytes:
    """Usage and timing, if asked for: where no chunk has usage a comment has the timing, which clients skip."""
    timing = {"timing": job.timing} if _wants_timing(request) else {}
    if job.options.include_usage:
        return event({**job.head, "choices": [], "usage": job.usage, **timing})
    return f": timing {json.dumps(job.timing)}\n\n".encode("ascii") if timing else b""


def _wants_timing(request: web.Request) -> bool:
    return request.headers.get(TIMING_HEADER, "").strip() == "1"


async def _shape_prompts(job: Job, writers: Sequence[ChunkWriter], deliveries: list[Delivery]) -> None:
    """Of the choices whose first event comes now."""
    for delivery in deliveries:
        writer = writers[delivery.choice]
        if delivery.error is None and writer.prompt is NOTHING:
            writer.prompt = await job.shaper.parts(job.completions[delivery.choice])


async def _next(request: web.Request, response: web.StreamResponse, mailbox: Mailbox) -> list[Delivery]:
    """What has arrived; until something does, a comment now and then if that is wanted, which begins the response."""
    silence_s = request.app[SERVICE].config.router.stream_keepalive_s or None
    while True:
        try:
            async with asyncio.timeout(silence_s):
                return await mailbox.take()
        except TimeoutError:
            await response.prepare(request)
            await response.write(COMMENT)


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
