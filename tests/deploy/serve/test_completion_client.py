import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from deploy.serve.completion_client import CompletionFailed, stream_completion

DEADLINE_S = 60.0


@asynccontextmanager
async def server(reply: list[Any], status: int = 200) -> AsyncIterator[str]:
    """A server whose every completion streams `reply`; the string `[DONE]` ends a good one."""

    async def completions(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream_options"] == {"include_usage": True}
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in reply:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def collect(into: list[str]) -> Callable[[str], None]:
    return into.append


async def test_text_is_handed_over_as_it_comes_and_tokens_are_counted() -> None:
    seen: list[str] = []
    async with server([text("O "), text("Romeo"), USAGE, "[DONE]"]) as url:
        times = await stream_completion(url, {"prompt": "x"}, collect(seen), DEADLINE_S)
    assert seen == ["O ", "Romeo"]
    assert times.num_tokens == 2
    assert times.ttft_s > 0
    assert times.tpot_s >= 0


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        ([text("O "), {"error": {"message": "worker lost"}}], 200, "worker lost"),
        ([text("O ")], 200, r"without \[DONE\]"),
        ([text("O "), "[DONE]"], 200, "without a usage record"),
        (["busy"], 503, "HTTP 503: data: busy"),
    ],
)
async def test_a_failed_completion_says_why(reply: list[Any], status: int, message: str) -> None:
    async with server(reply, status) as url:
        with pytest.raises(CompletionFailed, match=message):
            await stream_completion(url, {"prompt": "x"}, lambda _: None, DEADLINE_S)
