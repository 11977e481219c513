"""Each request explains itself: in the log, and to a client that asks."""

import json
import logging
from typing import Any

import aiohttp
import pytest

from common.base.errors import RequestError
from tests.router.bench import LENGTH, Bench
from tests.router.conftest import Client, Cluster

PROMPT = "the quick brown fox"
ASKED = {"X-Baton-Timing": "1"}
PHASES = ("queued_ms", "prefill_ms", "handoff_ms", "decode_ms")


def check(timing: Any, num_choices: int = 1) -> None:
    assert [told["index"] for told in timing] == list(range(num_choices))
    for told in timing:
        assert (told["prefill_worker"], told["decode_worker"], told["kv_path"]) == ("prefill-0", "decode-0", "shm")
        assert told["attempts"] == 1 and told["cached_tokens"] == 0 and told["route"] == "the only pair with room"
        assert sum(told[phase] for phase in PHASES) == pytest.approx(told["e2e_ms"], abs=0.01)
        assert 0 < told["ttft_ms"] <= told["e2e_ms"] and told["read_ms"] > 0


async def test_a_response_tells_its_timing_if_it_is_asked_to(client: Client) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "n": 2}
    plain = await client.completions.create(**fields)
    assert not hasattr(plain, "timing")
    told = await client.completions.create(**fields, extra_headers=ASKED)
    assert told.model_extra is not None
    check(told.model_extra["timing"], num_choices=2)
    nothing = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, extra_headers=ASKED)
    assert nothing.model_extra is not None and nothing.model_extra["timing"] == [], "no worker had to do with it"


@pytest.mark.medium
async def test_a_chat_tells_it_too(client: Client) -> None:
    messages: Any = [{"role": "user", "content": "fox"}]
    told = await client.openai.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, extra_headers=ASKED
    )
    assert told.model_extra is not None
    check(told.model_extra["timing"])


async def test_a_stream_tells_it_beside_its_usage(client: Client) -> None:
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=4, stream=True, stream_options={"include_usage": True},
            extra_headers=ASKED,
        )
    ]  # fmt: skip
    extras = [chunk.model_extra or {} for chunk in chunks]
    assert all("timing" not in extra for extra in extras[:-1])
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    check(extras[-1]["timing"])


async def test_a_stream_without_usage_tells_it_in_a_comment_that_clients_skip(client: Client, cluster: Cluster) -> None:
    texts, reasons, chunks = await client.streamed(prompt=PROMPT, max_tokens=4, extra_headers=ASKED)
    plain, _, plain_chunks = await client.streamed(prompt=PROMPT, max_tokens=4)
    assert all(chunk.choices for chunk in [*chunks, *plain_chunks]), "none is for the times"
    assert texts.keys() == plain.keys() and list(reasons) == [0]
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    async with (
        aiohttp.ClientSession(cluster.url, headers=ASKED) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        events = (await response.text()).split("\n\n")
    comment, done, rest = events[-3:]
    assert (done, rest) == ("data: [DONE]", "")
    assert comment.startswith(": timing ") and comment.isascii() and "\n" not in comment
    check(json.loads(comment.removeprefix(": timing ")))
    assert all(event.startswith("data: ") for event in events[:-3])


def test_the_log_has_a_line_for_people_and_fields_for_programs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    completion = bench.submit(num_prompt_tokens=7, max_tokens=3)
    for index, worker in enumerate((bench.prefills[0], bench.decodes[0], bench.decodes[0])):
        bench.now_s += (0.5, 0.25, 2.0)[index]
        bench.token(worker, completion, index, 1, LENGTH if index == 2 else 0)
    (record,) = (record for record in caplog.records if hasattr(record, "fields"))
    assert record.getMessage() == (
        "[cmpl-1] finished length: 7 prompt tokens, 0 cached, 3 output tokens, 1 attempts, ttft 500 ms, e2e 2750 ms: "
        "queued 0, prefill 500, handoff 250, decode 2000, p0 -> d0, the only pair with room"
    )
    assert record.fields == {
        "request_id": "cmpl-1", "client_request_id": "", "state": "finished", "finish_reason": "length",
        "error": None, "prompt_tokens": 7, "expected_cached_tokens": 0, "output_tokens": 3, "index": 0, "attempts": 1,
        "read_ms": 0.0, "queued_ms": 0.0, "prefill_ms": 500.0, "handoff_ms": 250.0, "decode_ms": 2000.0,
        "ttft_ms": 500.0, "e2e_ms": 2750.0, "cached_tokens": 0, "prefill_worker": "p0", "decode_worker": "d0",
        "kv_path": "shm", "route": "the only pair with room",
    }  # fmt: skip


def test_what_never_came_to_a_worker_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(num_decode=0)
    completion = bench.submit()
    bench.now_s += 3
    bench.dispatcher.abort(completion)
    assert completion.timing is not None
    assert (completion.timing["queued_ms"], completion.timing["route"]) == (3000.0, "no worker")
    assert "aborted, as nobody wants it any more: 4 prompt tokens" in caplog.text and "ttft none" in caplog.text
    bench.submit()
    bench.dispatcher.fail_all(RequestError("no", code="server_draining", status=503))
    assert "failed server_draining: 4 prompt tokens" in caplog.text
