"""Several fronts over one dispatcher: texts as of one router, whoever of them dies, restarts or stands still."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.fronts import Fronts
from tests.e2e.held_system import FEW, begun

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
MAX_TOKENS = 60
SILENCE_S = 5.0
CHAT = [{"role": "user", "content": "Who goes there?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    },
}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "ROMEO:"}),
    ("completions", {"prompt": ["ROMEO:", "JULIET:"], "n": 2, "temperature": 1.0, "seed": 7, "logprobs": 3}),
    ("completions", {"prompt": "ROMEO:", "stop": [" the", "O"], "include_stop_str_in_output": True}),
    ("completions", {"prompt": "ROMEO:", "max_tokens": 0, "echo": True, "logprobs": 2}),
    ("completions", {"prompt": "ROMEO:", "prompt_logprobs": 2, "return_token_ids": True}),
    ("completions", {"prompt": "ROMEO:", "guided_regex": "[a-z]{12}"}),
    ("completions", {"prompt": "ROMEO:", "max_tokens": -1}),
    ("chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"}),
    ("responses", {"input": "Who goes there?", "max_output_tokens": 12}),
]
CHANGING = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "call_id",
    "prompt_tokens_details",
    "input_tokens_details",
}
"""Fields that answers have anew, or by what is cached when they are asked for."""


def lasting(value: Any) -> Any:
    """An answer without what every answer has anew."""
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items() if name not in CHANGING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def near(value: Any) -> Any:
    """An answer whose numbers are as exact as batches of any size give them."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, dict):
        return {name: near(each) for name, each in value.items()}
    return type(value)(map(near, value)) if isinstance(value, list | tuple) else value


async def answers(url: str) -> list[Any]:
    """Everything asked, whole and streamed, one after the other."""
    found: list[Any] = []
    async with aiohttp.ClientSession() as session:
        for path, fields in ASKED:
            for stream in (False, True):
                limit = {} if "max_tokens" in fields or path == "responses" else {"max_tokens": 12}
                body = {"temperature": 0, "stream": stream, **limit, **fields}
                async with session.post(f"{url}/v1/{path}", json=body) as response:
                    text = await response.text()
                    if not stream or response.status != 200:
                        found.append((response.status, lasting(json.loads(text))))
                        continue
                    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
                    found.append([lasting(json.loads(line)) for line in lines])
    return found


async def test_two_fronts_answer_as_one_router_does() -> None:
    with Fronts(DEMO).start() as system:
        urls = [system.start_front(name) for name in ("front-0", "front-1")]
        wanted = await answers(system.url)
        assert len(wanted) == 2 * len(ASKED)
        for found in await asyncio.gather(*map(answers, urls)):
            for (path, fields), ours, theirs in zip(
                [each for each in ASKED for _ in range(2)], found, wanted, strict=True
            ):
                assert texts_of(ours) == near(texts_of(theirs)), (path, fields)
        system.until(lambda: system.num_active() == 0)
        system.until(system.all_blocks_free)


def texts_of(answer: Any) -> Any:
    """A whole answer; of a stream, whose events may hold more or fewer tokens, what a client puts together."""
    if not isinstance(answer, list):
        return answer
    joined: dict[tuple[Any, ...], str] = {}
    ends = []
    for event in answer:
        for choice in event.get("choices", []):
            for name, value in {**choice, **choice.get("delta", {})}.items():
                if isinstance(value, str) and name in ("text", "content"):
                    key = (choice["index"], name)
                    joined[key] = joined.get(key, "") + value
            ends += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
        if event.get("type", "").endswith(".delta"):
            joined[(event["type"],)] = joined.get((event["type"],), "") + event["delta"]
        if event.get("type") == "response.completed":
            ends.append(event["response"]["output"])
    return joined, sorted(ends, key=str)


async def test_whoever_dies_or_stands_still_no_stream_of_another_front_changes(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(6, 10, 60, seed=5)
    reference = Reference(directory, model)
    wanted = [reference.text(prompt, MAX_TOKENS, ignore_eos=True) for prompt in asked]
    with Fronts(directory, SILENCE_S).start() as system:
        urls = [system.start_front(name) for name in ("front-0", "front-1")]

        async def held(url: str) -> "asyncio.Task[list[Completion]]":
            """Streams that have begun, and go on when the system is released."""
            streams = [Completion() for _ in asked]
            task = asyncio.create_task(complete_all(url, asked, streams, max_tokens=MAX_TOKENS, ignore_eos=True))
            await begun(task, streams)
            return task

        async def until(condition: Callable[[], bool]) -> None:
            await asyncio.to_thread(system.until, condition)

        # A front dies: its requests end at the dispatcher, those of the other go on.
        system.holds.texts.set(FEW)
        lost, others = await held(urls[0]), await held(urls[1])
        assert system.num_active() == 2 * len(asked)
        await asyncio.to_thread(system.kill, "front-0")
        await asyncio.gather(lost, return_exceptions=True)
        await until(lambda: system.num_active() == len(asked))
        system.release()
        assert [stream.text for stream in await others] == wanted
        await until(system.all_blocks_free)

        # The dispatcher dies: fronts hand their streams to the next, with what was written so far.
        system.holds.texts.set(FEW)
        going_on = await held(urls[1])
        port = int(system.url.rpartition(":")[2])
        await asyncio.to_thread(system.kill, "router")
        await asyncio.to_thread(system.start_router, port)
        system.release()
        assert [stream.text for stream in await going_on] == wanted
        await asyncio.to_thread(system.wait_ready, 1, 1)

        # A front stands still for longer than it may be silent: when it wakes, its streams go on.
        urls[0] = await asyncio.to_thread(system.start_front, "front-0")
        system.holds.texts.set(FEW)
        sleeping, awake = await held(urls[0]), await held(urls[1])
        system.processes["front-0"].send_signal(signal.SIGSTOP)
        await until(lambda: system.num_active() == len(asked))
        assert "is lost: silent for" in system.log("router")
        system.release()
        assert [stream.text for stream in await awake] == wanted
        assert not sleeping.done()
        system.processes["front-0"].send_signal(signal.SIGCONT)
        assert [stream.text for stream in await sleeping] == wanted

        # The dispatcher stands still for as long: its fronts wait.
        system.holds.texts.set(FEW)
        waiting = await held(urls[0])
        system.processes["router"].send_signal(signal.SIGSTOP)
        await until(lambda: "is silent for" in system.log("front-0"))
        system.release()
        system.processes["router"].send_signal(signal.SIGCONT)
        assert [stream.text for stream in await waiting] == wanted
        await until(lambda: system.num_active() == 0)
        await until(system.all_blocks_free)
