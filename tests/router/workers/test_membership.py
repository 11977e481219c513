"""Workers that come, go, die and return, seen through real sockets and HTTP."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
import tokenizers

from common.base.errors import ErrorCode
from common.wire.messages.worker import (
    Abort,
    Inquiry,
    PeerGone,
    PrefillRequest,
    Refused,
    StillBound,
    WorkerGone,
    WorkerLeaving,
)
from common.wire.messages.worker_id import connection_of
from router.placement.capacity import most_tokens
from tests.router.conftest import Client, Cluster, StartCluster
from tests.support.fakes import FakeDecode

PROMPT = "the quick brown fox"


@pytest.mark.medium
@pytest.mark.parametrize("how", ["kill", "silent", "stuck"])
async def test_a_decode_worker_lost_mid_stream_changes_no_text(client: Client, cluster: Cluster, how: str) -> None:
    first = cluster.workers[1]
    assert isinstance(first, FakeDecode)
    first.most_outputs = 20
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    running = asyncio.create_task(client.streamed(**fields, extra_body={"ignore_eos": True}))
    metric = "baton_generation_tokens_total"
    registry = cluster.service.metrics.registry
    await cluster.until(lambda: (registry.get_sample_value(metric) or 0) > 10, "some tokens")
    cluster.decode("decode-1", step_s=0.001)
    await cluster.until_paths(2)
    if how == "kill":
        await asyncio.to_thread(first.kill)
    elif how == "silent":
        first.silent = True
        await cluster.until(lambda: not cluster.age(first, 1.1), "the loss of the worker")
    else:
        first.step_age_s = 1e6
    texts, reasons, _ = await running
    assert texts == {0: client.expected(PROMPT, max_tokens=300, stop_token_ids=())}
    assert reasons == {0: "length"}
    assert registry.get_sample_value("baton_replays_total", {"reason": "worker_lost"}) == 1
    assert [(gone.worker_id, gone.epoch) for gone in cluster.workers[0].got(PeerGone)] == [("decode-0", first.epoch)]
    if how == "stuck":
        await cluster.until(lambda: first.got(Refused), "the stuck worker is refused")
    if how == "silent":
        first.silent, first.most_outputs = False, 300
        await cluster.until(lambda: cluster.service.pool.get("decode-0", first.epoch), "it is let in again")
        await cluster.until(lambda: first.got(Abort), "its old attempt is aborted")


async def test_a_prefill_worker_lost_before_the_first_token(client: Client, cluster: Cluster) -> None:
    """With none left the decode worker computes the prompt itself."""
    prefill = cluster.workers[0]
    prefill.mute = True
    running = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, temperature=0))
    await cluster.until(lambda: prefill.got(PrefillRequest), "the request")
    await asyncio.to_thread(prefill.kill)
    response = await running
    assert response.choices[0].text == client.expected(PROMPT)


async def test_a_worker_whose_connection_is_gone_is_lost_before_it_has_been_silent_for_long(
    client: Client, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(cluster.workers[0].kill)
    identity = connection_of("prefill-0", cluster.workers[0].epoch)

    def is_noticed() -> bool:
        cluster.service.hub.send(identity, Abort("r", 0))
        return "prefill worker prefill-0" in caplog.text

    await cluster.until(is_noticed, "the loss of the worker")
    assert "its connection is gone" in caplog.text and "no heartbeat" not in caplog.text


async def test_a_lost_prompt_costs_a_moment(client: Client, cluster: Cluster) -> None:
    prefill, decode = cluster.workers
    prefill.lose_next = PrefillRequest
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)
    assert prefill.got(Inquiry) and decode.got(Inquiry)


async def test_a_worker_that_fails_is_tried_again(client: Client, cluster: Cluster) -> None:
    cluster.workers[0].fail_next = ErrorCode.INTERNAL
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)
    cluster.workers[0].fail_next = ErrorCode.NEVER_FITS
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt=PROMPT)


async def test_health_is_whether_a_completion_is_answered_and_what_is_wrong(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(worker_wait_s=0.2)
    request = {"prompt": "a", "stream": True}
    async with aiohttp.ClientSession(cluster.url) as session:

        async def health() -> tuple[int, dict[str, Any]]:
            async with session.get("/health") as response:
                return response.status, await response.json()

        status, body = await health()
        assert status == 503
        assert body["status"] == "unavailable" and "decode_worker" in body["problems"][0]
        async with session.post("/v1/completions", json=request) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
            assert "no decode worker takes requests" in (await response.json())["error"]["message"]
        cluster.decode(path_error="no way through")
        await cluster.until(lambda: most_tokens(cluster.service.pool), "a decode worker alone")
        assert [(await health())[0], (await health())[1]["status"]] == [200, "degraded"]
        async with session.post("/v1/completions", json=request | {"stream": False}) as response:
            assert response.status == 200, "it computes prompts, too"
        prefill = cluster.prefill()
        await cluster.until_paths(1)
        status, body = await health()
        assert (status, body["status"]) == (200, "degraded") and "no way through" in body["problems"][0]
        cluster.decode("decode-1")
        await cluster.until_paths(2)
        prefill.kill()
        await cluster.until(lambda: len(list(cluster.service.pool)) == 2, "its end")
        status, body = await health()
        assert (status, body["status"]) == (200, "degraded") and "no prefill worker" in body["problems"][0]
        async with session.get("/metrics") as response:
            told = await response.text()
        assert 'baton_status{status="degraded"} 1.0' in told and 'baton_status{status="ok"} 0.0' in told
        assert 'baton_problems{kind="no_prefill_worker"} 1.0' in told


async def test_a_prefill_worker_without_a_path_leaves_the_decode_worker_serving(
    start_cluster: StartCluster, tokenizer: tokenizers.Tokenizer
) -> None:
    cluster = await start_cluster()
    cluster.prefill()
    decode = cluster.decode(path_error="no way through")
    await cluster.until_paths(1)
    client = Client(cluster, tokenizer)
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)
    assert len(decode.got(PrefillRequest)) == 1
    await client.openai.close()


async def test_a_worker_with_another_model_is_refused(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    worker = cluster.decode(model_fingerprint="other")
    await cluster.until(lambda: worker.got(Refused), "Refused")
    assert "model fingerprint is other" in worker.got(Refused)[0].reason
    assert "give both the same [model]" in worker.got(Refused)[0].reason
    assert list(cluster.service.pool) == []


async def test_a_worker_whose_files_have_changed_is_told_whose_files_are_which(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    cluster.prefill()
    await cluster.until(lambda: len(list(cluster.service.pool)) == 1, "the worker that began before")
    worker = cluster.decode(model_fingerprint="other", model_files="/models/m, 2 files of 8.050 GB")
    await cluster.until(lambda: worker.got(Refused), "Refused")
    [reason] = [message.reason for message in worker.got(Refused)]
    info = cluster.service.tokenizer.info
    assert reason.startswith(f"model fingerprint is other, the router's is {info.model_fingerprint}; the contents of")
    assert "this worker read /models/m, 2 files of 8.050 GB; " in reason
    assert f"the router read {info.files}, as prefill-0 did; " in reason and info.files.count("last changed 20")
    assert reason.endswith("restart the router and all workers, else give both the same [model]")


async def test_a_restarted_worker_takes_its_name_over(client: Client, cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.workers[1].kill)
    again = cluster.decode("decode-0")
    await cluster.until(lambda: cluster.service.pool.get("decode-0", again.epoch), "the new incarnation")
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)


async def test_a_restarted_router_finds_its_workers_again(
    start_cluster: StartCluster, client: Client, cluster: Cluster
) -> None:
    endpoint = cluster.service.hub.endpoint
    await cluster.runner.cleanup()
    again = await start_cluster(endpoint)
    await again.until_paths(1)
    async with aiohttp.ClientSession(again.url) as session:
        body = {"prompt": PROMPT, "temperature": 0}
        async with session.post("/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["text"] == client.expected(PROMPT)


async def test_a_leaving_worker_gets_nothing_new(client: Client, cluster: Cluster) -> None:
    first = cluster.workers[1]
    cluster.decode("decode-1")
    await cluster.until_paths(2)
    first.say(WorkerLeaving(first.worker_id, first.epoch))
    await cluster.until(lambda: any(worker.draining for worker in cluster.service.pool), "draining")
    for _ in range(3):
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    assert {request.decode_worker_id for request in cluster.workers[0].got(PrefillRequest)} == {"decode-1"}


async def test_a_worker_that_says_it_is_dead_is_gone_at_once(client: Client, cluster: Cluster) -> None:
    first, prefill = cluster.workers[1], cluster.workers[0]
    first.mute = True
    running = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, temperature=0))
    await cluster.until(lambda: prefill.got(PrefillRequest), "the request")
    cluster.decode("decode-1")
    await cluster.until_paths(2)
    first.say(WorkerGone(first.worker_id, first.epoch, "out of luck"))
    assert (await running).choices[0].text == client.expected(PROMPT)
    assert [request.decode_worker_id for request in prefill.got(PrefillRequest)] == ["decode-0", "decode-1"]
    assert len(prefill.got(PeerGone)) == 1


async def test_a_leaving_worker_is_told_how_many_requests_still_need_it(client: Client, cluster: Cluster) -> None:
    prefill, first = cluster.workers
    prefill.mute = True
    running = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, n=2, temperature=0.5))
    await cluster.until(lambda: len(prefill.got(PrefillRequest)) == 2, "prompts bound to it")
    for leaving in (first, prefill):
        leaving.say(WorkerLeaving(leaving.worker_id, leaving.epoch))
    await cluster.until(lambda: first.got(StillBound) and prefill.got(StillBound), "the answers")
    assert [bound.num_requests for bound in [*first.got(StillBound), *prefill.got(StillBound)]] == [2, 2]
    running.cancel()
    await cluster.until(lambda: cluster.service.dispatcher.num_active == 0, "the client is gone")
    first.say(WorkerLeaving(first.worker_id, first.epoch))
    await cluster.until(lambda: len(first.got(StillBound)) == 2, "the answer")
    assert first.got(StillBound)[1].num_requests == 0
    first.say(WorkerGone(first.worker_id, first.epoch, "drained"))  # a fake lives on: soon it is let in again
    await cluster.until(lambda: prefill.got(PeerGone), "it is gone at once")


async def test_a_request_that_finds_many_workers_dead_is_not_blamed_for_any(
    start_cluster: StartCluster, tokenizer: tokenizers.Tokenizer
) -> None:
    cluster = await start_cluster(max_attempts=2)
    cluster.decode()
    prefills = [cluster.prefill(f"prefill-{i}") for i in range(6)]
    await cluster.until_paths(6)
    client = Client(cluster, tokenizer)
    cluster.stop_clockwork()  # here the request itself has to find out
    await asyncio.gather(*(asyncio.to_thread(prefill.kill) for prefill in prefills))
    await cluster.until_cut_off(*prefills)
    assert len(list(cluster.service.pool)) == 7, "the router does not know yet"
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)
    await client.openai.close()
