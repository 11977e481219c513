"""Cross-origin requests: browsers let pages of the named origins call the server; none by default.

A browser first sends OPTIONS without a key, so preflights are answered before keys are checked. All other responses to
an allowed page get a header.
"""

import re

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

ALLOWED_ORIGINS = web.AppKey("allowed_origins", frozenset[str])
ANY = "*"
NAMES = re.compile(r"[!-~ ]{1,2000}")
MAX_AGE_S = 600
"""Time for which a browser may cache a preflight's answer."""


def parse_origins(text: str) -> frozenset[str]:
    """Return the origins of `router.cors_origins`."""
    return frozenset(origin for origin in text.split(",") if origin)


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell a browser the methods and headers allowed to a page of a named origin."""
    method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
    if request.method != hdrs.METH_OPTIONS or method is None or not _is_allowed(request):
        return await handler(request)
    headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST", hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S)}
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    if NAMES.fullmatch(wanted):  # all headers are allowed, because clients add their own
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let an allowed page read the response; a hook of `on_response_prepare`."""
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
