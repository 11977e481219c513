"""Checked requests and answers as bytes, on the way from a reading process to the router."""

from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec

from common.base.errors import RequestError
from common.base.json_file import JsonObject
from router.requests.completion_api import CompletionRequest
from router.text.prompts import Prompt

TYPES: dict[str, Any] = {each.name: each.type for each in fields(CompletionRequest)}


def packed_or_error(reply: Callable[[], bytes], num_bytes: int) -> bytes:
    """Return the reply to a body of `num_bytes`, or its packed RequestError; memory exhaustion is an error, too."""
    try:
        return reply()
    except RequestError as error:
        return _packed(vars(error))
    except MemoryError:
        message = f"a body of {num_bytes} bytes holds too many values to be read; split the request"
        return _packed(vars(RequestError(message, code="request_too_large", status=413)))


def packed_request(request: CompletionRequest) -> bytes:
    """Pack a request for `unpack`; prompts are texts or tokens."""
    prompts = [prompt if isinstance(prompt, str) else prompt.tobytes() for prompt in request.prompts]
    return _packed({name: getattr(request, name) for name in TYPES} | {"prompts": prompts})


def packed_answer(answer: bytes) -> bytes:
    """Pack an answer for `unpack_answer`."""
    return _packed({"answer": answer})


def unpack(reply: bytes) -> CompletionRequest:
    """Return the packed request; raise the packed RequestError."""
    values = _reply_values(reply)
    prompts = list(map(_prompt, values.pop("prompts")))
    typed: dict[str, Any] = {name: msgspec.convert(value, TYPES[name]) for name, value in values.items()}
    return CompletionRequest(prompts=prompts, **typed)


def unpack_answer(reply: bytes) -> bytes:
    """Return the packed answer; raise the packed RequestError."""
    found: bytes = _reply_values(reply)["answer"]
    return found


def _reply_values(reply: bytes) -> JsonObject:
    values: JsonObject = msgspec.msgpack.decode(reply)
    if "message" in values:
        raise RequestError(values.pop("message"), **values)
    return values


def _prompt(packed: str | bytes) -> Prompt:
    if isinstance(packed, str):
        return packed
    ids = array("i")
    ids.frombytes(packed)
    return ids


def _packed(values: JsonObject) -> bytes:
    return msgspec.msgpack.encode(values)
