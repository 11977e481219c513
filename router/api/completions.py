"""HTTP endpoints of completions, chats and responses, from the check of a request to the last delivery.

A streamed response begins with the first token, so an earlier error keeps its HTTP status. With
`router.stream_keepalive_s`, a comment may begin the response earlier.
"""

import asyncio
import time
from dataclasses import replace

from aiohttp import web
from aiohttp.http import HttpVersion11

from common.base.errors import RequestError
from router.answers.request_choices import Job, make_job, submitted
from router.api.api_kinds import CHATS, COMPLETIONS, RESPONSES, Api
from router.api.http_request import CLIENT_REQUEST_ID, REQUEST_ID, SERVICE, received
from router.api.silence import Silence
from router.api.telemetry import SPAN
from router.base.json_rules import wrong
from router.dispatch.completion.journey import Arrival
from router.http.api_keys import OWNER
from router.http.connection import connection_of
from router.http.errors import JSON
from router.requests.completion_api import with_grammar

COMMENT = b": keep-alive\n\n"
"""Comment ignored by clients; shows proxies a live stream."""
ABOUT_A_FIELD = ("unknown_field", "unsupported_value")
"""Codes of errors about a field of exactly the given name; others concern the prompt's content."""
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

routes = web.RouteTableDef()


@routes.post("/v1/completions/")
@routes.post("/v1/completions")
async def post_completions(request: web.Request) -> web.StreamResponse:
    """Complete prompts (OpenAI's completions API)."""
    return await _respond(request, COMPLETIONS)


@routes.post("/v1/chat/completions/")
@routes.post("/v1/chat/completions")
async def post_chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation (OpenAI's chat completions API)."""
    return await _respond(request, CHATS)


@routes.post("/v1/responses/")
@routes.post("/v1/responses")
async def post_responses(request: web.Request) -> web.StreamResponse:
    """Answer an input (OpenAI's responses API); nothing is stored."""
    return await _respond(request, RESPONSES)


async def _respond(request: web.Request, api: Api) -> web.StreamResponse:
    try:
        return await _answered(request, api)
    except RequestError as error:
        _name_prompt(error, api)
        raise


def _name_prompt(error: RequestError, api: Api) -> None:
    """Put the API's own name of the prompt into an error about the prompt."""
    if error.param in ("prompt", "messages") and error.code not in ABOUT_A_FIELD:
        error.param = api.prompt_field


async def _answered(request: web.Request, api: Api) -> web.StreamResponse:
    job = await _job(request, api)
    service = request.app[SERVICE]
    await asyncio.sleep(0)  # give way, because making thousands of completions takes long
    order = service.order(job.choices)
    for _ in order.prepare():
        await asyncio.sleep(0)
    try:
        with submitted(order):
            if not job.options.stream:
                return await _whole(request, api, job)
            return await asyncio.create_task(_stream(request, api, job))  # resumed for each step, without middlewares
    finally:
        request[SPAN].answer(job)


async def _job(request: web.Request, api: Api) -> Job:
    service, received_s = request.app[SERVICE], time.monotonic()
    service.admit()  # refuse before reading a body in vain
    async with received(request) as body:
        body_s = time.monotonic()
        checked = await service.reader.read(body.pieces, service.max_model_len, api.kind)
    arrival = Arrival(received_s, body_s, time.monotonic())
    _check_priority(checked.priority, service.config.router.min_priority)
    checked = with_grammar(checked, await service.grammars.compiled(checked.grammar))
    if request[OWNER]:
        checked = replace(checked, client=request[OWNER], owner=request[OWNER])  # a client can invent a user's name
    connection_of(request).output.client = checked.client or connection_of(request).address
    head = api.head(request[REQUEST_ID], service.tokenizer.info.name, checked.response.stream)
    request[SPAN].describe(checked, arrival)
    return make_job(service, checked, head, request[CLIENT_REQUEST_ID], received_s, request[SPAN].watch)


def _check_priority(priority: int, most_urgent: int) -> None:
    """Raise RequestError for a priority more urgent than the server allows."""
    if priority < most_urgent:
        raise wrong("priority", priority, f"at least router.min_priority, {most_urgent}: lower goes first")


async def _whole(request: web.Request, api: Api, job: Job) -> web.Response:
    answer = api.whole(job)
    num_open = len(job.choices)
    while num_open:
        for delivery in await job.mailbox.take():
            if delivery.error is not None:
                raise delivery.error
            answer.add(delivery)
            num_open -= delivery.finish_reason is not None
    return web.Response(text=await answer.body(), content_type=JSON)


async def _stream(request: web.Request, api: Api, job: Job) -> web.StreamResponse:
    """Write events without waiting for the client to read.

    So a slow reader does not delay a completion. The connection bounds the unread bytes. Silence is filled with
    comments, and the first comment begins the response.
    """
    connection, mailbox = connection_of(request), job.mailbox
    output = connection.output
    response, answer = web.StreamResponse(headers=STREAM_HEADERS), api.streamed(job)
    num_open, has_begun, has_failed = len(job.choices), False, False
    is_chunked = request.version >= HttpVersion11
    with Silence(mailbox, request.app[SERVICE].config.router.stream_keepalive_s) as silence:
        while True:
            deliveries = await mailbox.take()
            for delivery in deliveries:
                num_open -= delivery.finish_reason is not None
                if delivery.error is not None:
                    _name_prompt(delivery.error, api)
                    has_failed = True
            if not has_begun:
                if deliveries and deliveries[0].error is not None:
                    raise deliveries[0].error
                await response.prepare(request)
                has_begun = True
            events = await answer.events(deliveries) if deliveries else b"" if output.is_full else COMMENT
            if events:
                output.write(connection.transport, events, is_chunked=is_chunked)
                silence.end()
            if num_open == 0 or has_failed:
                break
            if output.is_full:
                await output.rest()
    output.write(connection.transport, answer.end(is_complete=num_open == 0), is_chunked=is_chunked)
    return response
