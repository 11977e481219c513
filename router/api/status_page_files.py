"""The status page at `/`: files beside this one, with nothing from elsewhere, and nothing to be run but them.

They say nothing of the system, so they are there for everybody; what they show they ask for, with a key where one is
needed.
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
"""Also what is told from the network can never become a script: no text is taken for HTML."""
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
    """The status page."""
    return _answer(request, FIRST)


@page_routes.get("/status/{name}")
async def get_page_part(request: web.Request) -> web.Response:
    """What it is made of."""
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
"""What needs no API key."""
