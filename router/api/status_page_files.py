"""The status page at `/`: static files beside the module, without external content.

The files tell nothing about the system, so no API key guards the page. The page's script fetches the data, with a key
where required.
"""

import hashlib
from pathlib import Path

from aiohttp import hdrs, web

DIRECTORY = Path(__file__).with_name("status_page")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Policy without external content; data from the network can never become a script or HTML."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
FILES = {path.name: path.read_bytes() for path in sorted(DIRECTORY.iterdir()) if path.suffix in KINDS}
FIRST = "index.html"

page_routes = web.RouteTableDef()


@page_routes.get("/")
async def get_page(request: web.Request) -> web.Response:
    """Return the status page."""
    return _answer(request, FIRST)


@page_routes.get("/status/{name}")
async def get_page_part(request: web.Request) -> web.Response:
    """Return a file of the status page."""
    name = request.match_info["name"]
    if name not in FILES:
        raise web.HTTPNotFound
    return _answer(request, name)


def _answer(request: web.Request, name: str) -> web.Response:
    version = f'"{hashlib.sha256(FILES[name]).hexdigest()[:16]}"'
    headers = HEADERS | {hdrs.ETAG: version}
    if request.headers.get(hdrs.IF_NONE_MATCH) == version:
        return web.Response(status=304, headers=headers)
    return web.Response(body=FILES[name], content_type=KINDS[Path(name).suffix], charset="utf-8", headers=headers)


OPEN_PAGES = (get_page, get_page_part)
"""Handlers without an API key."""
