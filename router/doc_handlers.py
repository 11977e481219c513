"""HTTP endpoints that describe all others: `/openapi.json` for programs, `/docs` for people."""

import json

from aiohttp import web

from router.docs_page import page
from router.openapi import document
from router.responses import JSON

OPENAPI = web.AppKey("openapi", bytes)
DOCS = web.AppKey("docs", str)
NOTHING_ELSE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

doc_routes = web.RouteTableDef()


def describe(app: web.Application, *, wants_key: bool) -> None:
    """Write both down, once the routes are there."""
    described = document(app, wants_key=wants_key)
    app[OPENAPI], app[DOCS] = json.dumps(described).encode("ascii"), page(described)


@doc_routes.get("/openapi.json")
async def get_openapi(request: web.Request) -> web.Response:
    """This, as OpenAPI."""
    return web.Response(body=request.app[OPENAPI], content_type=JSON)


@doc_routes.get("/docs")
async def get_docs(request: web.Request) -> web.Response:
    """This, as a page."""
    return web.Response(text=request.app[DOCS], content_type="text/html", headers=NOTHING_ELSE)


OPEN_DOCS = (get_openapi, get_docs)
"""What needs no API key: it says how to show one, and nothing of who asks for what."""
