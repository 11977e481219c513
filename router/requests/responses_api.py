"""OpenAI's responses API: makes the request of an equivalent chat from a JSON body."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.base.helper_frames import Kind
from router.base.json_fields import Values
from router.requests.chat_api import chat_request, parse_chat
from router.requests.chat_fields import CHAT_FIELDS
from router.requests.completion_api import CompletionRequest, check_model, json_object
from router.requests.responses_fields import ALSO_OF_CHATS, LOGPROBS, RESPONSES_FIELDS
from router.text.chat_model import ChatModel

SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "user",
    *ALSO_OF_CHATS,
)
NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Names of chat fields, and the names in the responses API."""
DEFAULTS: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}
"""Request fields repeated in the response, with the values of absent fields."""
SERVED: JsonObject = {
    "background": False,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""Constant fields of all responses."""


def parse_response(body: Json, model: ChatModel, max_model_len: int) -> CompletionRequest:
    """Check every field and write the prompt; raise RequestError naming the first wrong field."""
    values = RESPONSES_FIELDS.read(json_object(body))
    check_model(values["model"], model.info.name)
    RESPONSES_FIELDS.require("input", values)
    try:
        request = chat_request(_chat_values(values), model, max_model_len)
    except RequestError as error:
        raise _renamed(error) from None
    grammar = replace(request.grammar, field=NAMES.get(request.grammar.field, request.grammar.field))
    response = replace(request.response, repeated=_repeated(body, values), has_summary=_summary(values) is not None)
    return replace(request, grammar=grammar, response=response)


def _chat_values(values: Values) -> JsonObject:
    """Return values of all chat fields."""
    instructions = values["instructions"]
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    defaults = {name: field.default for name, field in CHAT_FIELDS.fields.items()}
    wants_logprobs = LOGPROBS in values["include"]
    return (
        defaults
        | {name: values[name] for name in SAME}
        | {
            "messages": [*system, *values["input"]],
            "max_tokens": values["max_output_tokens"],
            "response_format": _response_format(values),
            "reasoning_effort": (values["reasoning"] or {}).get("effort"),
            "logprobs": wants_logprobs,
            "top_logprobs": values["top_logprobs"] if wants_logprobs else None,
        }
    )


def _response_format(values: Values) -> JsonObject | None:
    form = (values["text"] or {}).get("format")
    if form is None:
        return None
    return {"type": form["type"], "json_schema": {name: form[name] for name in form if name != "type"}}


def _repeated(body: JsonObject, values: Values) -> str:
    """Return the JSON of request fields repeated in the response."""
    repeated = {name: default if body.get(name) is None else body[name] for name, default in DEFAULTS.items()}
    return json.dumps(repeated | dict(_configured(body, values)) | SERVED)


def _configured(body: JsonObject, values: Values) -> Iterator[tuple[str, Json]]:
    """Yield objects of the request, with defaults for absent values."""
    text = body.get("text") or {}
    yield "text", {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"}
    yield "reasoning", {"effort": (values["reasoning"] or {}).get("effort"), "summary": _summary(values)}


def _summary(values: Values) -> str | None:
    """Return the requested kind of summary; None if not requested."""
    reasoning = values["reasoning"] or {}
    return reasoning.get("summary") or reasoning.get("generate_summary")


def _renamed(error: RequestError) -> RequestError:
    """Put names of the responses API into an error about chat fields."""
    error.param = NAMES.get(error.param or "", error.param)
    for name, own_name in NAMES.items():
        error.message = error.message.replace(name, own_name)
    return error


PARSERS: dict[Kind, Callable[[Json, ChatModel, int], CompletionRequest]] = {
    Kind.CHAT: parse_chat,
    Kind.RESPONSE: parse_response,
}
"""Parsers by kind of conversation; call in the main thread, because templates run there."""
