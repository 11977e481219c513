"""OpenAI's response bodies, whole and as server-sent events.

A stream writes one event a token, thousands a second: everything of a chunk but the text is made
once for each choice.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from aiohttp import web

from common.errors import RequestError
from router.openai_api import ResponseOptions
from router.request_state import Completion, Delivery

JSON = "application/json"
DONE = b"data: [DONE]\n\n"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def completion_body(
    head: dict[str, Any],
    options: ResponseOptions,
    texts: Sequence[str],
    completions: Sequence[Completion],
    usage: dict[str, int],
) -> dict[str, Any]:
    """The body of a response that is not streamed: the text of each completion."""
    choices = []
    for text, completion in zip(texts, completions, strict=True):
        choice: dict[str, Any] = {
            "index": completion.index,
            "text": text,
            "logprobs": completion.logprobs and completion.logprobs.part(0, len(completion.outputs)),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if options.token_ids:
            choice |= {"prompt_token_ids": list(completion.prompt_ids), "token_ids": completion.outputs}
        choices.append(choice)
    return {**head, "choices": choices, "usage": usage}


def head_of(response_id: str, created_s: int, model: str) -> dict[str, Any]:
    """The fields that all chunks of a response share."""
    return {"id": response_id, "object": "text_completion", "created": created_s, "model": model}


def usage_of(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Each prompt counts once, however many choices it has."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


class ChunkWriter:
    """Server-sent events of one choice."""

    def __init__(self, head: dict[str, Any], options: ResponseOptions, completion: Completion) -> None:
        self._completion = completion
        self._options = options
        self._num_sent = 0  # tokens
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": [{{"index": {completion.index}, "text": '

    def chunk(self, delivery: Delivery) -> bytes:
        """One event; a finish reason stands only in a choice's last, and with it what ended the text."""
        reason = "null"
        if delivery.finish_reason is not None:
            reason = f'"{delivery.finish_reason}", "stop_reason": {json.dumps(self._completion.stop_reason)}'
        ids = self._token_ids(delivery) if self._options.token_ids else ""
        text = encode_basestring_ascii(delivery.text)
        after = (
            f', "logprobs": {self._logprobs(delivery)}, "finish_reason": {reason}{ids}}}]{self._usage(delivery)}}}\n\n'
        )
        self._num_sent = delivery.num_outputs
        return (self._before + text + after).encode("ascii")

    def _logprobs(self, delivery: Delivery) -> str:
        """Of the tokens since the last event."""
        log = self._completion.logprobs
        return "null" if log is None else json.dumps(log.part(self._num_sent, delivery.num_outputs))

    def _token_ids(self, delivery: Delivery) -> str:
        """Of the prompt in the first event only."""
        completion = self._completion
        ids: dict[str, list[int]] = {"token_ids": completion.outputs[self._num_sent : delivery.num_outputs]}
        if self._num_sent == 0:
            ids["prompt_token_ids"] = list(completion.prompt_ids)
        return f", {json.dumps(ids)[1:-1]}"

    def _usage(self, delivery: Delivery) -> str:
        if self._options.continuous_usage:
            return f', "usage": {json.dumps(usage_of(len(self._completion.prompt_ids), delivery.num_outputs))}'
        return ', "usage": null' if self._options.include_usage else ""


def event(body: dict[str, Any]) -> bytes:
    """Any other event."""
    return f"data: {json.dumps(body)}\n\n".encode("ascii")


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error shape."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> web.Response:
    """The HTTP response of an error, with Retry-After where a retry makes sense."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(text=json.dumps(error_body(error)), status=error.status, content_type=JSON, headers=headers)
