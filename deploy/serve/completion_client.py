"""A small streaming client of /v1/completions that measures times."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp

from common.base.errors import BatonError
from common.base.json_file import JsonObject


class CompletionFailed(BatonError):
    """An error answer of the server, or an early end of the stream."""


@dataclass(frozen=True, slots=True)
class CompletionTimes:
    """Times of a completion as seen by the client; `tpot_s` is 0 for a single token."""

    num_tokens: int
    ttft_s: float
    tpot_s: float


async def stream_completion(
    url: str, body: JsonObject, on_text: Callable[[str], object], deadline_s: float
) -> CompletionTimes:
    """Send `body`, pass each piece of text to `on_text`, and return the times.

    Raises CompletionFailed, aiohttp.ClientError, or TimeoutError after `deadline_s`.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    sent_s = time.perf_counter()
    first_s = last_s = 0.0
    num_tokens = 0
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=request) as response,
    ):
        async for event in _events(response):
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                on_text(event["choices"][0]["text"])
    if not num_tokens:
        raise CompletionFailed("the stream ended without a usage record")
    return CompletionTimes(num_tokens, first_s - sent_s, (last_s - first_s) / max(1, num_tokens - 1))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[JsonObject]:
    """Yield the JSON of each server-sent event up to `[DONE]`; raises CompletionFailed without `[DONE]`."""
    if response.status != 200:
        raise CompletionFailed(f"HTTP {response.status}: {(await response.text())[:500]}")
    async for raw in response.content:
        data = raw.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if raw.startswith(b"data: "):
            event = json.loads(data)
            if "error" in event:
                raise CompletionFailed(str(event["error"].get("message", event["error"])))
            yield event
    raise CompletionFailed("the stream ended without [DONE]")
