"""Cross-origin requests: which pages of others a browser lets call this server; none, unless origins are named.

A browser asks first, with OPTIONS and without a key, so that is answered before keys are looked at. All else is a
header on every response to a page that may.
"""

import re

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

ALLOWED_ORIGINS = web.AppKey("allowed_origins", frozenset[str])
ANY = "*"
NAMES = re.compile(r"[!-~ ]{1,2000}")
MAX_AGE_S = 600
"""How long a browser may remember what it was told."""


def parse_origins(text: str) -> frozenset[str]:
    """The origins of router.cors_origins."""
    return frozenset(origin for origin in text.split(",") if origin)


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell a browser what a page may send, if it may send anything."""
    method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
    if request.method != hdrs.METH_OPTIONS or method is None or not _is_allowed(request):
        return await handler(request)
    headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST", hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S)}
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    if NAMES.fullmatch(wanted):  # clients bring headers of their own; those of others do not matter here
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let a page read the response; a hook of `on_response_prepare`."""
    origins = request.app[ALLOWED_ORIGINS]
    if origins and ANY not in origins:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if _is_allowed(request):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = ANY if ANY in origins else request.headers[hdrs.ORIGIN]
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "X-Request-Id, Retry-After"


def _is_allowed(request: web.Request) -> bool:
    origins = request.app[ALLOWED_ORIGINS]
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and (ANY in origins or origin in origins)
