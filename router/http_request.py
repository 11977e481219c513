"""What handlers share: the service behind them, the id of a request, and the way to its body."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from common.errors import RequestError
from router.bodies import Body
from router.door import refuse_surplus
from router.service import Service

SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)


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
