"""HTTP endpoints of the API documentation: `/openapi.json` for programs, `/docs` for people."""

import json
from functools import cached_property

from aiohttp import web

from common.base.json_file import JsonObject
from router.api.docs_page import page
from router.api.openapi import document
from router.http.errors import JSON

NOTHING_ELSE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

doc_routes = web.RouteTableDef()


class Description:
    """Both documents, made when first requested, because the model is known by then."""

    def __init__(self, app: web.Application, *, wants_key: bool) -> None:
        self._app, self._wants_key = app, wants_key

    @cached_property
    def document(self) -> JsonObject:
        return document(self._app, wants_key=self._wants_key)

    @cached_property
    def openapi(self) -> bytes:
        return json.dumps(self.document).encode("ascii")

    @cached_property
    def docs(self) -> str:
        return page(self.document)


DESCRIPTION = web.AppKey("description", Description)


@doc_routes.get("/openapi.json")
async def get_openapi(request: web.Request) -> web.Response:
    """Return the OpenAPI description of the server."""
    return web.Response(body=request.app[DESCRIPTION].openapi, content_type=JSON)


@doc_routes.get("/docs")
async def get_docs(request: web.Request) -> web.Response:
    """Return the API documentation as an HTML page."""
    return web.Response(text=request.app[DESCRIPTION].docs, content_type="text/html", headers=NOTHING_ELSE)


OPEN_DOCS = (get_openapi, get_docs)
"""Handlers without an API key: the documents explain keys and tell nothing about requests."""
