"""HTTP endpoints about the server: liveness, health, metrics, version, load and status."""

from aiohttp import web

from common.base.version import VERSION
from common.wire.messages.frames import WIRE_NAME
from router.api.http_request import SERVICE
from router.base.exposition import CONTENT_TYPE
from router.base.shapes import Live, Load, Version
from router.http.errors import JSON

status_routes = web.RouteTableDef()


@status_routes.post("/ping")
@status_routes.get("/ping")
@status_routes.get("/health")
async def get_health(request: web.Request) -> web.Response:
    """Answer 200 while completions are served, in full or degraded, else 503; the body lists the problems."""
    report = await request.app[SERVICE].health()
    return web.json_response(report, status=200 if report["status"] in ("ok", "degraded") else 503)


@status_routes.get("/live")
async def get_live(_: web.Request) -> web.Response:
    """Answer 200 while the event loop runs, whatever the workers do."""
    live: Live = {"status": "ok"}
    return web.json_response(live)


@status_routes.get("/metrics")
async def get_metrics(request: web.Request) -> web.Response:
    """Return metrics in Prometheus' text format."""
    return web.Response(body=await request.app[SERVICE].exposition(), headers={"Content-Type": CONTENT_TYPE})


@status_routes.get("/version")
async def get_version(_: web.Request) -> web.Response:
    """Return the package's version with the commit, and the wire version required of workers."""
    version: Version = {"version": VERSION, "wire": WIRE_NAME}
    return web.json_response(version)


@status_routes.get("/load")
async def get_load(request: web.Request) -> web.Response:
    """Return the number of completions queued or at workers."""
    load: Load = {"server_load": request.app[SERVICE].num_active}
    return web.json_response(load)


@status_routes.get("/status.json")
async def get_status(request: web.Request) -> web.Response:
    """Return the data of the status page at `/`: workers, load, the last minutes and incidents."""
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=await request.app[SERVICE].status_body(), content_type=JSON, headers=headers)


OPEN_TO_ALL = (get_live, get_health, get_metrics)
"""Handlers without an API key."""
