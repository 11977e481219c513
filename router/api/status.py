"""HTTP endpoints that tell of the server: whether it lives, serves, how busy it is, and what it is."""

import time

from aiohttp import web

from common.base.version import VERSION
from common.wire.messages.frames import WIRE_NAME
from router.api.http_request import SERVICE
from router.base.exposition import CONTENT_TYPE, exposition
from router.base.shapes import Live, Load, Version
from router.http.error_bodies import JSON
from router.observe import health

status_routes = web.RouteTableDef()


@status_routes.post("/ping")
@status_routes.get("/ping")
@status_routes.get("/health")
async def get_health(request: web.Request) -> web.Response:
    """Answer 200 while completions are answered, in full or degraded, else 503; the body says what is wrong."""
    service = request.app[SERVICE]
    parts = service.pool, service.memory_servers, service.role_changes
    report = health.report(*parts, draining=service.dispatcher.draining, now_s=time.monotonic())
    return web.json_response(report, status=200 if report["status"] in ("ok", "degraded") else 503)


@status_routes.get("/live")
async def get_live(_: web.Request) -> web.Response:
    """200 while the event loop turns, whatever the workers do."""
    live: Live = {"status": "ok"}
    return web.json_response(live)


@status_routes.get("/metrics")
async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus exposition."""
    body = await exposition(request.app[SERVICE].metrics.families())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


@status_routes.get("/version")
async def get_version(_: web.Request) -> web.Response:
    """The package and its commit, and which messages it speaks with workers: those of another wire are refused."""
    version: Version = {"version": VERSION, "wire": WIRE_NAME}
    return web.json_response(version)


@status_routes.get("/load")
async def get_load(request: web.Request) -> web.Response:
    """How many completions are queued or at workers."""
    load: Load = {"server_load": request.app[SERVICE].dispatcher.num_active}
    return web.json_response(load)


@status_routes.get("/status.json")
async def get_status(request: web.Request) -> web.Response:
    """What the page at `/` shows: who serves, how busy, the last minutes, what went wrong."""
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=request.app[SERVICE].status.body(), content_type=JSON, headers=headers)


OPEN_TO_ALL = (get_live, get_health, get_metrics)
"""What needs no API key."""
