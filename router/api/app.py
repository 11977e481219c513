"""The aiohttp application: routes, error bodies, startup and shutdown.

`handler_cancellation` is on: a client's disconnect cancels the handler at once, and the handler aborts the completions.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from common.base.errors import ConfigError, RequestError
from common.settings.config import Config
from router.api.completions import routes
from router.api.documents import DESCRIPTION, OPEN_DOCS, Description, doc_routes
from router.api.http_request import CLIENT_CLOSED_REQUEST, REQUEST_ID, SERVICE, name_request, repeat_name
from router.api.models import model_routes
from router.api.status import OPEN_TO_ALL, status_routes
from router.api.status_page_files import OPEN_PAGES, page_routes
from router.api.succession import SUCCESSION, Succession
from router.api.telemetry import TELEMETRY, make_telemetry, with_span
from router.http.acceptor import Acceptor, bound_sockets
from router.http.api_keys import API_KEYS, ApiKeys, guarded
from router.http.connection import SERVER
from router.http.connection_limit import DESCRIPTOR_LIMITS, descriptor_limits, is_surplus
from router.http.cors import ALLOWED_ORIGINS, allow_origin, answer_preflights, parse_origins
from router.http.errors import error_response, from_http
from router.http_service import HttpService
from router.service import Service

logger = logging.getLogger(__name__)

STARTED = web.RequestKey("response_started", web.StreamResponse)
SHUTDOWN_S = 2.0
"""Time for connections to close after all requests have ended."""
MakeService = Callable[[Config], HttpService]
"""Makes what the handlers use; raises ConfigError."""


def make_app(config: Config, make_service: MakeService = Service) -> web.Application:
    """Make the application; the service lives from startup to cleanup."""
    guard = guarded(*OPEN_TO_ALL, *OPEN_PAGES, *OPEN_DOCS)
    app = web.Application(middlewares=[shape_errors, answer_preflights, guard, with_span])
    app[API_KEYS] = ApiKeys(config.router.api_key_file)
    app[ALLOWED_ORIGINS] = parse_origins(config.router.cors_origins)
    app[DESCRIPTOR_LIMITS] = descriptor_limits()
    app.add_routes([*routes, *model_routes, *status_routes, *doc_routes, *page_routes])
    app[DESCRIPTION] = Description(app, wants_key=bool(config.router.api_key_file))
    app.on_response_prepare.extend([_on_response_prepare, _close_last, allow_origin])

    async def life(app: web.Application) -> AsyncIterator[None]:
        app[SERVICE] = service = make_service(config)
        app[TELEMETRY] = telemetry = make_telemetry(config.router, service.tokenizer.info.name)
        service.start()
        app[SUCCESSION] = succession = Succession(config.router, lambda: service.status_name)
        yield
        await succession.close()
        await service.close()
        await asyncio.to_thread(telemetry.close)

    app.cleanup_ctx.append(life)
    return app


async def start_server(config: Config, make_service: MakeService = Service) -> tuple[web.AppRunner, str]:
    """Serve, and return the runner and the URL; raise ConfigError when a port cannot be bound."""
    app = make_app(config, make_service)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    succession = app[SUCCESSION]
    try:
        taken = await succession.listeners()
        listeners = taken or await bound_sockets(config.router.host, config.router.port)
    except OSError as error:
        await runner.cleanup()
        where = f"{config.router.host}:{config.router.port}"
        raise ConfigError(
            f"cannot serve HTTP on {where}: {error.strerror}; choose another router.host or router.port"
        ) from None
    acceptor = Acceptor(runner, listeners, app[DESCRIPTOR_LIMITS], config.router, app[SERVICE].unread)
    await acceptor.start(accepts=taken is None)
    await succession.begin(acceptor)
    url = f"http://{_url_host(config.router.host)}:{acceptor.port}"
    logger.info("serving %s", url)
    return runner, url


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in OpenAI's shape, without internal details."""
    name_request(request)
    response_id = request[REQUEST_ID]
    try:
        return await handler(request)
    except RequestError as error:
        request.app[SERVICE].count_refusal(error)
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        told = from_http(error, request)
        request.app[SERVICE].count_refusal(told)
        response = error_response(told)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError as error:  # the client left; the returned response goes nowhere
        logger.info("[%s] nobody reads the response: %s", response_id, error)
        return request[STARTED] if STARTED in request else web.Response(status=CLIENT_CLOSED_REQUEST)
    except Exception:  # a bug costs only its own request, in OpenAI's error shape
        if STARTED in request:
            raise  # too late for a status; aiohttp logs the error and cuts the connection
        logger.exception("[%s] a bug in handling %s %.100s", response_id, request.method, request.path)
        return error_response(RequestError("internal error", code="internal_error", status=500))


async def _on_response_prepare(request: web.Request, response: web.StreamResponse) -> None:
    request[STARTED] = response
    response.headers["Server"] = SERVER
    repeat_name(request, response)


async def _close_last(request: web.Request, response: web.StreamResponse) -> None:
    """Close a surplus connection, or any connection of a leaving router, after a response."""
    if is_surplus(request) or request.app[SUCCESSION].is_leaving:
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
