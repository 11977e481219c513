"""What handlers share: the service behind them, the id of a request, and the way to its body."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from common.base.errors import RequestError
from router.dispatch.request_state import new_response_id
from router.http.connection_limit import refuse_surplus
from router.reading.bodies import Body
from router.service import Service

SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)
"""Ours, of which there is one."""
CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
"""The client's, which is only repeated; "" without one."""
HEADER = "X-Request-Id"
SHOWABLE = re.compile(r"[ -~]{1,128}")


def name_request(request: web.Request) -> None:
    """Give it an id, and remember what the client calls it."""
    told = request.headers.get(HEADER, "")
    request[REQUEST_ID] = new_response_id()
    request[CLIENT_REQUEST_ID] = told if SHOWABLE.fullmatch(told) else ""


def repeat_name(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client its own id again, or ours."""
    if REQUEST_ID in request:
        response.headers[HEADER] = request[CLIENT_REQUEST_ID] or request[REQUEST_ID]


@asynccontextmanager
async def received(request: web.Request) -> AsyncIterator[Body]:
    """The JSON body, whole, until the block ends; raises RequestError for one that is not taken."""
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
