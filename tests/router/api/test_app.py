"""The router end to end: real HTTP with the real client, real sockets, fake workers."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.base.errors import RequestError
from common.wire.messages.worker import Abort
from common.wire.values.sampling_params import SamplingParams
from router.api.app import _on_response_prepare, shape_errors
from router.requests.completion_api import choice_seed
from tests.router.conftest import EOS, MAX_MODEL_LEN, Client, Cluster, StartCluster

PROMPT = "the quick brown fox"


async def test_whole_and_streamed_responses_agree(client: Client) -> None:
    response = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0)
    outputs = client.outputs(PROMPT, max_tokens=40)
    assert response.id.startswith("cmpl-")
    assert response.choices[0].text == client.expected(PROMPT, max_tokens=40)
    assert response.choices[0].finish_reason == ("stop" if outputs[-1] == EOS else "length")
    assert response.usage is not None
    num_prompt = len(client.ids(PROMPT))
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (num_prompt, len(outputs))
    texts, reasons, chunks = await client.streamed(
        prompt=PROMPT, max_tokens=40, temperature=0, stream_options={"include_usage": True}
    )
    assert texts == {0: response.choices[0].text}
    assert reasons == {0: response.choices[0].finish_reason}
    assert (chunks[-1].choices, chunks[-1].usage) == ([], response.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_end_of_text_stops_and_ignore_eos_goes_on(client: Client) -> None:
    model = client.model
    before = next(i for i in range(1, model.vocab_size) if model.next_token(i, SamplingParams(temperature=0.0)) == EOS)
    fields: dict[str, Any] = {"model": "tiny", "prompt": [before], "max_tokens": 10, "temperature": 0}
    response = await client.completions.create(**fields)
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("", "stop")
    assert response.usage is not None
    assert response.usage.completion_tokens == 1
    response = await client.completions.create(**fields, extra_body={"ignore_eos": True})
    assert response.choices[0].finish_reason == "length"
    assert response.choices[0].text == client.expected([before], max_tokens=10, stop_token_ids=())


async def test_lists_of_prompts_and_n(client: Client) -> None:
    prompts = ["the lazy dog", "schöne Grüße"]
    fields: dict[str, Any] = {"prompt": prompts, "n": 3, "seed": 5, "max_tokens": 12}
    response = await client.completions.create(model="tiny", **fields)
    expected = {
        p * 3 + i: client.expected(prompt, max_tokens=12, temperature=1.0, seed=choice_seed(5, i))
        for p, prompt in enumerate(prompts)
        for i in range(3)
    }
    assert {choice.index: choice.text for choice in response.choices} == expected
    assert len(set(expected.values())) > 2
    texts, reasons, _ = await client.streamed(**fields)
    assert texts == expected
    assert set(reasons) == set(range(6))
    as_ids = await client.completions.create(model="tiny", **fields | {"prompt": [client.ids(p) for p in prompts]})
    assert {choice.index: choice.text for choice in as_ids.choices} == expected
    assert as_ids.usage == response.usage
    assert response.usage is not None
    assert response.usage.prompt_tokens == sum(len(client.ids(prompt)) for prompt in prompts)


async def test_stop_strings(client: Client, cluster: Cluster) -> None:
    whole = client.expected(PROMPT, max_tokens=60)
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": ["never", stop]}
    response = await client.completions.create(model="tiny", **fields)
    assert (response.choices[0].text, response.choices[0].finish_reason) == (cut, "stop")
    texts, reasons, _ = await client.streamed(**fields)
    assert (texts, reasons) == ({0: cut}, {0: "stop"})
    await cluster.until(lambda: all(worker.got(Abort) for worker in cluster.workers), "Abort at both workers")


async def test_what_exceeds_the_context_is_refused(client: Client) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 3)
    for asked in ({"max_tokens": 3}, {}):
        response = await client.completions.create(
            model="tiny", prompt=prompt, extra_body={"ignore_eos": True, **asked}
        )
        assert response.usage is not None
        assert response.usage.completion_tokens == 3
    refused: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 4},
        {"prompt": [5] * MAX_MODEL_LEN},
        {"prompt": "the fox " * 5000},
    ]
    for fields in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", **fields)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_while_it_is_written_to_costs_one_line_and_no_traceback(
    caplog: pytest.LogCaptureFixture, has_begun: bool
) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if has_begun:
            await response.prepare(request)
        assert request.transport is not None
        request.transport.close()
        if not has_begun:
            await response.prepare(request)
        await response.write(b"too late")
        raise AssertionError("unreachable")

    app = web.Application(middlewares=[shape_errors])
    app.on_response_prepare.append(_on_response_prepare)
    app.router.add_post("/", respond)
    with caplog.at_level(logging.INFO):
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                async with session.post(server.make_url("/")) as response:
                    await response.read()
    assert [record.getMessage().split("] ")[1] for record in caplog.records if record.name == "router.api.app"] == [
        "nobody reads the response: Cannot write to closing transport"
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_client_that_leaves_frees_both_workers(client: Client, cluster: Cluster) -> None:
    prefill, decode = cluster.workers
    decode.mute = True
    prompt = client.visible_prompt()
    stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=500, temperature=0, stream=True)
    await anext(aiter(stream))
    waiting = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT))
    active = cluster.service.dispatcher.active
    await cluster.until(lambda: [len(c.output.token_ids) for c in active] == [1, 1], "both prompts are computed")
    await stream.close()
    waiting.cancel()
    await cluster.until(lambda: len(prefill.got(Abort)) == len(decode.got(Abort)) == 2, "two Aborts at each worker")
    assert cluster.service.dispatcher.num_active == 0
    work = [worker.work for worker in cluster.service.pool]
    assert [(each.outstanding_tokens, each.num_assigned) for each in work] == [(0, 0), (0, 0)]


async def test_an_error_mid_stream_is_an_event(client: Client, cluster: Cluster) -> None:
    cluster.workers[1].mute = True
    prompt = client.visible_prompt()
    stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0, stream=True)
    await anext(aiter(stream))
    drained = await cluster.service.drain(0.0)
    assert not drained
    cluster.service.dispatcher.fail_all(RequestError("shut down", code="server_draining", status=503))
    with pytest.raises(openai.APIError, match="shut down"):
        await anext(aiter(stream))
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="tiny", prompt=PROMPT)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"]
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/health") as health:
        assert (health.status, (await health.json())["status"]) == (503, "draining")


async def test_errors_have_one_shape(cluster: Cluster) -> None:
    json_type = {"Content-Type": "application/json"}
    cases: list[tuple[str, str, Any, dict[str, str], int, str]] = [
        ("GET", "/nothing", None, {}, 404, "not_found"),
        ("GET", "/v1/completions", None, {}, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", None, {}, 404, "model_not_found"),
        ("POST", "/v1/completions", io.BytesIO(b"x" * (1 << 25)), json_type, 413, "request_too_large"),
        ("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", b"{", json_type, 400, "invalid_json"),
        ("POST", "/v1/completions", b"[" * 100_000, json_type, 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', json_type, 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": 1e999}', json_type, 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": 0}', json_type, 400, "invalid_value"),
    ]
    async with aiohttp.ClientSession(cluster.url) as session:
        for method, path, data, headers, status, code in cases:
            async with session.request(method, path, data=data, headers=headers) as response:
                body = await response.json()
                assert (response.status, body["error"]["code"]) == (status, code)
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert response.headers["X-Request-Id"].startswith("cmpl-")
                assert len(body["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/completions", "did you mean /v1/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/models/", "did you mean /v1/models?"),
        ("/v1/embeddings", "GET /docs lists all"),
    ],
)
async def test_a_wrong_base_url_is_told_the_right_path(cluster: Cluster, path: str, remedy: str) -> None:
    async with aiohttp.ClientSession(cluster.url) as session, session.post(path, json={}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"] == f"no such endpoint: POST {path}; {remedy}"


async def test_models_health_and_metrics(client: Client, cluster: Cluster) -> None:
    models = await client.openai.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await client.openai.models.retrieve("tiny")).id == "tiny"
    await client.completions.create(model="tiny", prompt=PROMPT)
    async with aiohttp.ClientSession(cluster.url) as session:
        async with session.get("/health") as response:
            body = await response.json()
            assert response.status == 200
            assert [path["gb_per_s"] for path in body["kv_paths"]] == [100.0]
            assert [worker["id"] for worker in body["workers"]["decode"]] == ["decode-0"]
        async with session.get("/live") as response:
            assert response.status == 200
        async with session.get("/metrics") as response:
            text = await response.text()
    assert 'baton_kv_path_bytes_per_second{decode="decode-0",prefill="prefill-0",transport="shm"} 1e+11' in text
    assert 'baton_workers{role="prefill"} 1.0' in text
    assert "baton_time_to_first_token_seconds_count 1.0" in text


async def test_too_many_requests(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(max_requests=2)
    async with aiohttp.ClientSession(cluster.url) as session:
        first = asyncio.create_task(session.post("/v1/completions", json={"prompt": "a", "n": 2}))
        await cluster.until(lambda: cluster.service.dispatcher.num_active == 2, "two completions queued")
        async with session.post("/v1/completions", json={"prompt": "a"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
        first.cancel()
        await cluster.until(lambda: cluster.service.dispatcher.num_active == 0, "the queue is empty")


@pytest.mark.medium
async def test_many_streams_at_once(client: Client) -> None:
    prompts = [[i + 1, i + 2] for i in range(64)]
    results = await asyncio.gather(
        *(client.streamed(prompt=prompt, max_tokens=50, temperature=0) for prompt in prompts)
    )
    for prompt, (texts, _, _) in zip(prompts, results, strict=True):
        assert texts == {0: client.expected(prompt, max_tokens=50)}


@pytest.mark.medium
def test_importing_the_router_imports_no_worker_room() -> None:
    code = "import sys, json, router.api.app, router.__main__; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    forbidden = {"torch", "triton", "safetensors", "transformers", "decode_worker", "prefill_worker"}
    assert forbidden.isdisjoint(modules)
