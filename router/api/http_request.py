"""Helpers of handlers: the service, request ids, and reading of bodies."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from common.base.errors import RequestError
from router.dispatch.completion.state import new_response_id
from router.http.connection_limit import refuse_surplus
from router.http_service import HttpService
from router.reading.bodies import Body

SERVICE = web.AppKey("service", HttpService)
REQUEST_ID = web.RequestKey("request_id", str)
"""The router's own id of the request; unique."""
CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
"""The client's id, only sent back; empty without an id."""
HEADER = "X-Request-Id"
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client left, for logs and spans."""
SHOWABLE = re.compile(r"[ -~]{1,128}")


def name_request(request: web.Request) -> None:
    """Give the request an id, and note the client's own id."""
    told = request.headers.get(HEADER, "")
    request[REQUEST_ID] = new_response_id()
    request[CLIENT_REQUEST_ID] = told if SHOWABLE.fullmatch(told) else ""


def repeat_name(request: web.Request, response: web.StreamResponse) -> None:
    """Send back the client's id of the request, or else the router's."""
    if REQUEST_ID in request:
        response.headers[HEADER] = request[CLIENT_REQUEST_ID] or request[REQUEST_ID]


@asynccontextmanager
async def received(request: web.Request) -> AsyncIterator[Body]:
    """Receive the whole JSON body, held until the block ends; raise RequestError for a refused body."""
    _check_content_type(request)
    refuse_surplus(request)
    with request.app[SERVICE].bodies.hold() as body:
        await body.receive(request)
        yield body


def _check_content_type(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise RequestError(
            f"content type {request.content_type[:80]!r}: send JSON with Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )
