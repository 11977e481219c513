"""HTTP endpoints of the model: the name, and the tokenizer in vLLM's shape."""

from aiohttp import web

from router.api.http_request import SERVICE, received
from router.base.helper_frames import Kind
from router.base.shapes import Model, ModelList
from router.http.errors import JSON
from router.http_service import HttpService
from router.requests import completion_api

model_routes = web.RouteTableDef()


@model_routes.get("/v1/models")
async def get_models(request: web.Request) -> web.Response:
    """List the served model."""
    models: ModelList = {"object": "list", "data": [_model(request.app[SERVICE])]}
    return web.json_response(models)


@model_routes.get("/v1/models/{model_id:.+}")
async def get_model(request: web.Request) -> web.Response:
    """Describe the served model, by name."""
    service = request.app[SERVICE]
    completion_api.check_model(request.match_info["model_id"], service.tokenizer.info.name)
    return web.json_response(_model(service))


@model_routes.post("/tokenize")
async def post_tokenize(request: web.Request) -> web.Response:
    """Return the tokens of a text or a conversation."""
    return await _answered(request, Kind.TOKENIZE)


@model_routes.post("/detokenize")
async def post_detokenize(request: web.Request) -> web.Response:
    """Return the text of tokens."""
    return await _answered(request, Kind.DETOKENIZE)


async def _answered(request: web.Request, kind: Kind) -> web.Response:
    service = request.app[SERVICE]
    async with received(request) as body:
        answer = await service.reader.answer(kind, body.pieces, service.max_model_len)
    return web.Response(body=answer, content_type=JSON)


def _model(service: HttpService) -> Model:
    name = service.tokenizer.info.name
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "baton",
        "root": name,
        "max_model_len": service.max_model_len,
    }
