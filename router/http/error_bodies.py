"""Error bodies and error responses in OpenAI's shape, for all endpoints."""

import json

from aiohttp import web

from common.base.errors import RequestError
from router.base.shapes import ErrorBody

JSON = "application/json"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: RequestError) -> ErrorBody:
    """Return an error in OpenAI's shape."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> web.Response:
    """Return the HTTP response of an error, with Retry-After where a retry makes sense."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(text=json.dumps(error_body(error)), status=error.status, content_type=JSON, headers=headers)
