"""A load generator that streams completions and notes when chunks arrive, with little work per chunk.

At hundreds of streams the client must not become the bottleneck. So request bodies are made beforehand, except in
conversations. A chunk costs a timestamp and a search; JSON is parsed only at a stream's end.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

import aiohttp

from deploy.bench.prefixes import Conversation
from deploy.bench.stats import RequestRecord
from deploy.bench.workload import Prompt

HEADERS = {"Content-Type": "application/json"}
MODELS_S, MAX_MODELS_BYTES = 10.0, 1 << 20
"""Limits of a server's list of models."""

OnEnd = Callable[[RequestRecord], None]
"""Receives the record of each request at its end."""


class Target:
    """An OpenAI-compatible server; `deadline_s` bounds each request, and a non-empty `api_key` is sent along."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, deadline_s: float, api_key: str = ""
    ) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._deadline_s = deadline_s
        self._headers = HEADERS | shown(api_key)

    def prepare(self, prompts: Sequence[Prompt]) -> list[bytes]:
        return [prompt.body(self._model) for prompt in prompts]

    async def complete(self, prompt: Prompt, body: bytes, record: RequestRecord | None = None) -> RequestRecord:
        """Send a request and follow the stream to the end; any failure is in the record.

        A caller with its own `record` can watch the stream's progress.
        """
        record = record or RequestRecord(sent_s=time.perf_counter())
        record.num_prompt_tokens, record.is_structured = prompt.num_tokens or 0, prompt.is_structured
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._follow(prompt, body, record)
        except TimeoutError:
            record.error = f"no end after {self._deadline_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended_s = record.ended_s or time.perf_counter()
        return record

    async def _follow(self, prompt: Prompt, body: bytes, record: RequestRecord) -> None:
        kept: list[bytes] | None = [] if prompt.returns_ids else None
        async with self._session.post(self._url, data=body, headers=self._headers) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            last_event = await _note_chunks(response, record, kept)
        record.ended_s = time.perf_counter()
        record.error = record.error or _settle(prompt, last_event, kept, record)


async def _note_chunks(response: aiohttp.ClientResponse, record: RequestRecord, kept: list[bytes] | None) -> bytes:
    """Timestamp every event with a choice, and return the last event before `[DONE]`.

    Events are appended to `kept`, if given. Events of a single read share a timestamp. An error event, or a stream
    without `[DONE]`, leaves an error in the record.
    """
    rest = last_event = b""
    async for data in response.content.iter_any():
        now_s = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                return last_event
            if event.startswith(b'{"error"'):
                record.error = event[:200].decode("utf-8", "replace")
                return event
            last_event = event
            if b'"choices":[]' not in event and b'"choices": []' not in event:
                record.chunk_times_s.append(now_s)
                if kept is not None:
                    kept.append(event)
    record.error = "the stream ended without [DONE]"
    return last_event


def _settle(prompt: Prompt, last_event: bytes, kept: Sequence[bytes] | None, record: RequestRecord) -> str:
    """Fill in token counts from the usage record; return the reply's fault, or an empty string."""
    usage = json.loads(last_event or b"{}").get("usage")
    if not usage:
        return "no usage record: tokens cannot be counted"
    record.num_output_tokens = usage["completion_tokens"]
    record.num_prompt_tokens = usage["prompt_tokens"]
    record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if record.num_output_tokens != prompt.max_tokens:
        return f"asked for {prompt.max_tokens} tokens, got {record.num_output_tokens}"
    if prompt.num_tokens not in (None, record.num_prompt_tokens):
        return f"sent {prompt.num_tokens} prompt tokens, the server counted {record.num_prompt_tokens}"
    if not record.chunk_times_s:
        return "no chunk carried a token"
    if kept is not None:
        choices = (json.loads(event)["choices"][0] for event in kept)
        record.output_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
        if len(record.output_ids) != record.num_output_tokens:
            return f"asked for the ids of {record.num_output_tokens} tokens, got {len(record.output_ids)}"
    return ""


async def run_at(
    target: Target, prompts: Sequence[Prompt], arrivals_s: Sequence[float], on_end: OnEnd
) -> list[RequestRecord]:
    """Send each prompt at its time after the start, however many requests are running."""
    bodies = target.prepare(prompts)
    start_s = time.perf_counter()

    async def send(prompt: Prompt, body: bytes, arrival_s: float) -> RequestRecord:
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        record = await target.complete(prompt, body)
        on_end(record)
        return record

    sends = [send(*each) for each in zip(prompts, bodies, arrivals_s, strict=True)]
    return list(await asyncio.gather(*sends))


async def run_concurrent(
    target: Target, prompts: Sequence[Prompt], concurrency: int, on_end: OnEnd
) -> list[RequestRecord]:
    """Keep `concurrency` requests running until all prompts are done."""
    waiting = iter(list(zip(prompts, target.prepare(prompts), strict=True)))
    records: list[RequestRecord] = []

    async def keep_one_running() -> None:
        for prompt, body in waiting:
            records.append(await target.complete(prompt, body))
            on_end(records[-1])

    await asyncio.gather(*(keep_one_running() for _ in range(concurrency)))
    return records


async def run_conversations(target: Target, talks: Sequence[Conversation], on_end: OnEnd) -> list[RequestRecord]:
    """Run all users at once, each turn following all earlier turns; a user stops after a failure."""
    records: list[RequestRecord] = []

    async def talk(conversation: Conversation) -> None:
        history: list[int] = []
        for number, (turn, think_s) in enumerate(zip(conversation.turns, conversation.thinks_s, strict=True)):
            await asyncio.sleep(think_s)
            prompt = turn.after(history)
            [body] = target.prepare([prompt])
            record = await target.complete(prompt, body)
            record.turn = number
            records.append(record)
            on_end(record)
            if record.error:
                return
            history = prompt.token_ids + record.output_ids

    await asyncio.gather(*map(talk, talks))
    return records


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session without limits: each request has its own deadline."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        yield session


class NoServer(RuntimeError):
    """No server with OpenAI's API at the URL."""


def shown(api_key: str) -> dict[str, str]:
    """Make the header with an API key; empty without a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def served_model(session: aiohttp.ClientSession, url: str, deadline_s: float, api_key: str = "") -> str:
    """Return the first model in the server's list; raises NoServer, after MODELS_S at most."""
    body = b""
    try:
        async with (
            asyncio.timeout(min(deadline_s, MODELS_S)),
            session.get(f"{url}/v1/models", headers=shown(api_key)) as response,
        ):
            response.raise_for_status()
            while some := await response.content.readany():
                body += some
                if len(body) > MAX_MODELS_BYTES:
                    raise ValueError(f"its answer has more than {MAX_MODELS_BYTES:,} bytes")
        return str(json.loads(body)["data"][0]["id"])
    except (OSError, aiohttp.ClientError, ValueError, RecursionError, LookupError, TypeError) as error:
        why = f"{type(error).__name__} {error!s:.200}".strip()
        if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
            raise NoServer(f"{url!r} asks for an API key ({why}): baton bench shows that of --api-key-file") from None
        is_silent = isinstance(error, TimeoutError | aiohttp.ClientConnectionError)
        trouble = "does not answer" if is_silent else "tells of no model"
        raise NoServer(
            f"{url!r} {trouble} ({why}): give the address of a server with OpenAI's API, such as "
            "http://127.0.0.1:8000, or name its --model"
        ) from None
