"""Errors as RequestErrors, also those found by aiohttp beside our handlers, and error responses in OpenAI's shape."""

import json

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError, LineTooLong

from common.base.errors import RequestError
from router.base.shapes import ErrorBody

JSON = "application/json"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MAX_SHOWN_CHARS = 80
MAX_REASON_CHARS = 160
MAX_LINE_BYTES = 8190
"""Limit for the request line, and for a header's value."""
MAX_HEADERS = 128
VERSION = "/v1"
"""Beginning of the paths of OpenAI's endpoints, which clients have in their base URL, once."""

CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    431: "headers_too_large",
}


def from_http(error: web.HTTPException, request: web.Request) -> RequestError:
    """Convert aiohttp's refusal of a readable request."""
    where = request.path[:MAX_SHOWN_CHARS]
    messages = {
        404: f"no such endpoint: {request.method} {where}; {_remedy(request)}",
        405: f"{request.method} is not allowed for {where}; see the Allow header",
    }
    return _error(error.status, messages.get(error.status, error.reason))


def _remedy(request: web.Request) -> str:
    """Return the endpoint that a path without `/v1`, or with more before or behind, is likely to mean."""
    path = request.path.rstrip("/")
    known = {resource.canonical for resource in request.app.router.resources()}
    likely = [each for each in known if path and path.endswith(each.removeprefix(VERSION))]
    return f"did you mean {max(likely, key=len)}?" if likely else "GET /docs lists all"


def from_parser(error: HttpProcessingError) -> RequestError:
    """Convert an HTTP parse error. The message may quote input, so only the sender may see the message."""
    if isinstance(error, LineTooLong):
        return _error(431, f"the request line or a header has more than {error.args[1]} bytes; send less")
    if error.message == "Too many headers received":
        return _error(431, f"more than {MAX_HEADERS} headers; send fewer")
    if isinstance(error, BadHttpMethod) and "HTTPS" in error.message:
        return _error(400, "this port speaks HTTP, and what came is HTTPS; use an http:// URL")
    reason = " ".join(error.message.rstrip(" ^\n").split())[:MAX_REASON_CHARS]
    return _error(error.code, reason if error.code != 400 else f"not a valid HTTP request: {reason}")


def _error(status: int, message: str) -> RequestError:
    return RequestError(message, code=CODES.get(status, "invalid_request"), status=status)


def error_body(error: RequestError) -> ErrorBody:
    """Return an error in OpenAI's shape."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError, kind: type[web.Response] = web.Response) -> web.Response:
    """Return the HTTP response of an error, of a class, with Retry-After where a retry makes sense."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return kind(text=json.dumps(error_body(error)), status=error.status, content_type=JSON, headers=headers)
