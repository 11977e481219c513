"""A small server that speaks the completions protocol, well or badly, and rows of what was seen of it."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from deploy.bench.results import Row, read_rows

DEADLINE_S = 60.0
BLOCK_SIZE = 16


@dataclass
class FakeServer:
    """Streams as many tokens as asked, `tokens_per_event` in each event; `fault` spoils each third reply.

    With `caches` it keeps all it has seen, block by block, and tells how much of a prompt that is. A word is a token.
    """

    tokens_per_event: int = 1
    fault: str = ""
    caches: bool = False
    gap_s: float = 0.0  # between two events
    pulled_bytes: int = 0  # by a worker of each role for each request, as its metrics tell; none at 0
    api_key: str = ""  # that clients have to show
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # keys, a request each
    seen: set[str] = field(default_factory=set)  # beginnings of texts, of full blocks

    def refuses(self, request: web.Request) -> bool:
        return bool(self.api_key) and request.headers.get("Authorization") != f"Bearer {self.api_key}"

    async def models(self, request: web.Request) -> web.Response:
        if self.refuses(request):
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": [{"id": "fake-model"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        if not self.pulled_bytes:
            return web.Response(status=404)
        lines = ["# HELP baton_worker_pulled_bytes of KV", 'baton_worker_pulled_blocks_total{role="decode"} 7.0']
        for role, times in (("decode", 1), ("prefill", 2)):
            name, told = "baton_worker_pulled_bytes_total", times * self.pulled_bytes * len(self.requests)
            lines += [f'{name}{{role="{role}",worker="{role}-{n}"}} {told:e}' for n in range(2)]
        return web.Response(text="\n".join([*lines, ""]))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if self.refuses(request):
            return web.json_response({"error": {"message": "no key"}}, status=401)
        self.shown.append(request.headers.get("Authorization", ""))
        self.requests.append(asked)
        fault = self.fault if len(self.requests) % 3 == 0 else ""
        if fault == "refused":
            return web.json_response({"error": {"message": "busy"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = asked["max_tokens"] - (fault == "short")
        prompt = asked["prompt"].split() if isinstance(asked["prompt"], str) else asked["prompt"]
        reply = [(sum(prompt) if isinstance(prompt[0], int) else 0) % 1000 + place for place in range(num_tokens)]
        for first in range(0, num_tokens, self.tokens_per_event):
            choice = {"text": f"{first} ", "index": 0}
            if asked.get("return_token_ids") and fault != "no ids":
                choice["token_ids"] = reply[first : first + self.tokens_per_event]
            await self.event(response, {"choices": [choice]})
            await asyncio.sleep(self.gap_s)
            if fault == "broken":
                await self.event(response, {"error": {"message": "worker lost"}})
                return response
            if fault == "cut":
                return response
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        if self.caches and (num_cached := self.known(prompt, reply)):  # like some, it says nothing of none
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        await self.event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def known(self, prompt: list[Any], reply: list[int]) -> int:
        """Tokens of the prompt's first blocks that were seen before, and not its last; from now on all of it is."""
        ends = range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)
        num_cached = max((end for end in ends if str(prompt[:end]) in self.seen), default=0)
        text = prompt + reply[:-1]
        self.seen |= {str(text[:end]) for end in range(BLOCK_SIZE, len(text) + 1, BLOCK_SIZE)}
        return num_cached

    async def event(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(body)}\n\n".encode())


class Running:
    """Runs fake servers on a loop in a thread of its own, as the program under test has its own loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.runners: list[web.AppRunner] = []

    def start(self, server: FakeServer) -> FakeServer:
        server.url = asyncio.run_coroutine_threadsafe(self._start(server), self.loop).result(DEADLINE_S)
        return server

    async def _start(self, server: FakeServer) -> str:
        app = web.Application()
        routes = [web.get("/v1/models", server.models), web.post("/v1/completions", server.completions)]
        app.add_routes([*routes, web.get("/metrics", server.metrics)])
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        self.runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def close(self) -> None:
        for runner in self.runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), self.loop).result(DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(DEADLINE_S)
        self.loop.close()


def figures(path: Path) -> dict[str, Row]:
    """Return the rows of a file of results by figure."""
    return {row.figure: row for row in read_rows(path)}
