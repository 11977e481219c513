"""What surrounds a completion: the id that a client gave its request, and comments while a stream is silent."""

import asyncio
import logging

import aiohttp
import openai
import pytest

from common.base.errors import RequestError
from tests.router.conftest import Client, Cluster, StartCluster


@pytest.mark.parametrize("told", ["bench-1f2e-7", "a b", "~" * 128])
async def test_the_id_of_a_client_comes_back_and_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, told: str
) -> None:
    headers = {"X-Request-Id": told}
    body = {"prompt": "the fox", "max_tokens": 2}
    with caplog.at_level(logging.INFO):
        async with aiohttp.ClientSession(cluster.url, headers=headers) as session:
            async with session.post("/v1/completions", json=body) as response:
                assert response.headers["X-Request-Id"] == told
                response_id = (await response.json())["id"]
            async with session.get("/nothing") as response:
                assert (response.status, response.headers["X-Request-Id"]) == (404, told)
    assert response_id.startswith("cmpl-")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "router.dispatch.completion.summary"]
    assert line.startswith(f"[{response_id}-0] ")
    assert line.endswith(f"asked as {told!r}")


@pytest.mark.parametrize("told", ["", "~" * 129, "ü", "a\tb"])
async def test_what_is_no_id_is_not_repeated(start_cluster: StartCluster, told: str) -> None:
    cluster = await start_cluster()
    session = aiohttp.ClientSession(cluster.url, headers={"X-Request-Id": told})
    async with session, session.get("/live") as response:
        assert response.headers["X-Request-Id"].startswith("cmpl-")


async def test_a_silent_stream_gets_comments_and_then_its_text(start_cluster: StartCluster, client: Client) -> None:
    cluster = await start_cluster(stream_keepalive_s=0.1)
    body = {"prompt": "the fox", "max_tokens": 20, "temperature": 0, "stream": True}
    async with aiohttp.ClientSession(cluster.url) as session, session.post("/v1/completions", json=body) as response:
        assert response.status == 200
        assert [await response.content.readline() for _ in range(4)] == [b": keep-alive\n", b"\n"] * 2
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as patient:
        stream = await patient.completions.create(
            model="tiny", prompt="the fox", max_tokens=20, temperature=0, stream=True
        )
        cluster.prefill("prefill-1")
        cluster.decode("decode-1")
        assert "".join([chunk.choices[0].text async for chunk in stream]) == client.expected("the fox", max_tokens=20)


async def test_an_error_after_a_comment_is_an_event(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(stream_keepalive_s=0.1)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="tiny", prompt="the fox", stream=True)
        cluster.service.dispatcher.fail_all(RequestError("shut down", code="server_draining", status=503))
        with pytest.raises(openai.APIError, match="shut down"):
            await anext(aiter(stream))


async def test_without_comments_a_stream_begins_with_its_text(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        asked = asyncio.create_task(client.completions.create(model="tiny", prompt="the fox", stream=True))
        await cluster.until(lambda: cluster.service.dispatcher.num_active, "the request")
        cluster.service.dispatcher.fail_all(RequestError("shut down", code="server_draining", status=503))
        with pytest.raises(openai.APIStatusError) as caught:
            await asked
        assert caught.value.status_code == 503
