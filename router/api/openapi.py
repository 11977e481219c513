"""OpenAPI document at `/openapi.json`, made of the router's routes, the tables of request fields, and `shapes`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler

from common.base.json_file import Json, JsonObject
from common.base.version import VERSION
from router.answers.responses_shapes import ResponseBody
from router.api.completions import post_chat_completions, post_completions, post_responses
from router.api.http_request import SERVICE
from router.api.models import get_model, get_models, post_detokenize, post_tokenize
from router.api.status import OPEN_TO_ALL, get_health, get_live, get_load, get_metrics, get_status, get_version
from router.base import shapes
from router.base.json_fields import Table
from router.base.shapes import schema_of
from router.requests.chat_fields import CHAT_FIELDS
from router.requests.completion_fields import COMPLETION_FIELDS
from router.requests.responses_fields import RESPONSES_FIELDS
from router.requests.token_api import DETOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, TOKENIZE_FIELDS
from router.text.server_rules import MODEL_NAME, limits_of

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
REASONS = {
    400: "a field, or the request, is wrong",
    401: "no API key, or one that is not the server's",
    404: "there is no such model, or endpoint",
    405: "the endpoint has no such method",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "the body is not plain JSON",
    429: "too much at once; Retry-After says when to try again",
    431: "the headers are too large",
    500: "a bug, or a request that one worker after the other died of or failed",
    503: "nothing can serve it now; Retry-After says when to try again",
    504: "it took longer than a request may, `router.request_timeout_s`",
}
ABOUT = (
    "What the schemas allow is accepted, but for what they cannot say: how two numbers go together, that a request has "
    "one form at most, that a name is that of a tool, what the model's chat template takes, that a prompt fits the "
    "context, and that a JSON schema, a regular expression or a grammar is one."
)
OF_ALL = (400, 431, 500)
OF_BODIES = (404, 408, 413, 415, 429)
OF_COMPLETIONS = (*OF_BODIES, 503, 504)
PATH_SCHEMAS = {"model_id": MODEL_NAME.schema}
Body: TypeAlias = tuple[Table, str]
"""Fields of an object, and the name of the required field."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Request bodies, answer and errors of a handler."""

    answer: Json  # a type of `shapes`, or str
    media_types: tuple[str, ...] = (JSON,)
    bodies: tuple[Body, ...] = ()  # alternatives
    errors: tuple[int, ...] = ()


ENDPOINTS: dict[Handler, Endpoint] = {
    post_completions: Endpoint(shapes.CompletionBody, (JSON, EVENTS), ((COMPLETION_FIELDS, "prompt"),), OF_COMPLETIONS),
    post_chat_completions: Endpoint(shapes.ChatBody, (JSON, EVENTS), ((CHAT_FIELDS, "messages"),), OF_COMPLETIONS),
    post_responses: Endpoint(ResponseBody, (JSON, EVENTS), ((RESPONSES_FIELDS, "input"),), OF_COMPLETIONS),
    post_tokenize: Endpoint(
        shapes.Tokens, bodies=((TOKENIZE_FIELDS, "prompt"), (TOKENIZE_CHAT_FIELDS, "messages")), errors=OF_BODIES
    ),
    post_detokenize: Endpoint(shapes.PromptText, bodies=((DETOKENIZE_FIELDS, "tokens"),), errors=OF_BODIES),
    get_models: Endpoint(shapes.ModelList),
    get_model: Endpoint(shapes.Model, errors=(404,)),
    get_health: Endpoint(shapes.Health),
    get_live: Endpoint(shapes.Live),
    get_load: Endpoint(shapes.Load),
    get_status: Endpoint(shapes.StatusReport),
    get_version: Endpoint(shapes.Version),
    get_metrics: Endpoint(str, (TEXT,)),
}
"""All documented handlers, without the documentation's own pages."""


def document(app: web.Application, *, wants_key: bool) -> JsonObject:
    """Return the OpenAPI 3.1 document of an application's routes; `wants_key` adds API keys."""
    paths: dict[str, JsonObject] = {}
    for path, method, handler in _routes(app):
        is_guarded = wants_key and handler not in OPEN_TO_ALL
        paths.setdefault(path, {})[method] = _operation(path, handler, ENDPOINTS[handler], is_guarded)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    service = app[SERVICE]
    limits = limits_of(service.tokenizer.info, service.config.router.min_priority)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": VERSION, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": {"ErrorBody": schema_of(shapes.ErrorBody), **limits},
            "securitySchemes": schemes if wants_key else {},
        },
    }


def _routes(app: web.Application) -> Iterator[tuple[str, str, Handler]]:
    """Yield path, method and handler of each documented route, without HEAD and trailing slashes."""
    for resource in app.router.resources():
        for route in resource:
            if route.handler in ENDPOINTS and route.method != "HEAD" and not resource.canonical.endswith("/"):
                yield resource.canonical, route.method.lower(), route.handler


def _operation(path: str, handler: Handler, endpoint: Endpoint, is_guarded: bool) -> JsonObject:
    statuses = sorted({*OF_ALL, *endpoint.errors, *((401,) if is_guarded else ())})
    answer = schema_of(endpoint.answer)
    operation: JsonObject = {
        "summary": (handler.__doc__ or "").strip(),
        "responses": {"200": _response("as asked for", endpoint.media_types, answer)}
        | {str(status): _error(status) for status in statuses},
    }
    if handler is get_health:
        operation["responses"]["503"] = _response("not now; `problems` says why", (JSON,), answer)
    if endpoint.bodies:
        schemas = [table.schema_with(required) for table, required in endpoint.bodies]
        content = {JSON: {"schema": {"anyOf": schemas} if len(schemas) > 1 else schemas[0]}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": PATH_SCHEMAS[name]}]
    if is_guarded:
        operation["security"] = [{"bearer": []}, {"header": []}]
    return operation


def _response(description: str, media_types: tuple[str, ...], schema: JsonObject) -> JsonObject:
    content = {kind: {"schema": schema_of(shapes.Event) if kind == EVENTS else schema} for kind in media_types}
    return {"description": description, "content": content}


def _error(status: int) -> JsonObject:
    return _response(REASONS[status], (JSON,), {"$ref": "#/components/schemas/ErrorBody"})
