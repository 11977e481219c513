"""Memory servers that come, go and tell of their workers' ends, seen through real sockets and HTTP."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import tokenizers

from common.memory.server.announcer import Announcer
from common.wire.messages.memory_reports import GroupUse, MemoryHeartbeat, MemoryReady
from common.wire.messages.worker import Knock, PeerGone, PrefillRequest, WorkerGone, WorkerLeaving
from common.wire.values.kv_layout import CacheKind
from router.workers import memory_servers
from router.workers.hub import Links
from router.workers.memory_servers import MemoryServers
from tests.router.conftest import NET, Client, Cluster, StartCluster
from tests.support.announcing import announcer
from tests.support.fakes import FakeDecode, FakeWorker

PROMPT = "the quick brown fox"
GB = 1 << 30


class FakeMemory:
    """A memory server without memory: its end of the router's wire is real. `silent`: as if it hung."""

    def __init__(self, cluster: Cluster, server_id: str) -> None:
        self.announcer = announcer(cluster.net, server_id)
        self.silent = False
        self.announcer.announce()
        self.task = asyncio.create_task(self._run())

    @property
    def named(self) -> dict[str, Any]:
        """How a worker says that its memory is here."""
        return {"memory_server_id": self.announcer.ready.server_id, "memory_server_epoch": self.announcer.ready.epoch}

    def report_ended(self, worker: FakeWorker) -> None:
        self.announcer.report_ended(worker.worker_id, worker.epoch)

    def kill(self) -> None:
        if not self.task.done():
            self.task.cancel()
            self.announcer.close()

    async def _run(self) -> None:
        while True:
            if not self.silent:
                self.announcer.update(self._heartbeat)
            await asyncio.sleep(0.01)

    def _heartbeat(self) -> MemoryHeartbeat:
        ready = self.announcer.ready
        counts = (70, 60, 40, 2, 1, 30, 2 * GB, 8, 9, 10)
        workers, groups = ("prefill-0", "decode-0"), (GroupUse(CacheKind.FULL, 9, GB), GroupUse(CacheKind.STATE, 2, 7))
        return MemoryHeartbeat(ready.server_id, ready.epoch, 3 * GB, 5 * GB, *counts, workers, 87, 64, groups)


StartMemory = Callable[..., Awaitable[FakeMemory]]


@pytest.fixture
async def start_memory() -> AsyncIterator[StartMemory]:
    """Start one that the router then knows."""
    started: list[FakeMemory] = []

    async def start(cluster: Cluster, server_id: str = "memory-0") -> FakeMemory:
        started.append(FakeMemory(cluster, server_id))
        epoch = started[-1].announcer.ready.epoch
        await cluster.until(lambda: epoch in epochs(cluster), "it is registered")
        return started[-1]

    yield start
    for memory in started:
        memory.kill()


def epochs(cluster: Cluster) -> list[int]:
    return [server.ready.epoch for server in cluster.service.memory_servers]


def age(cluster: Cluster) -> list[int]:
    """As if nothing were heard of memory servers for too long; returns those that are still in."""
    for server in cluster.service.memory_servers:
        server.last_seen_s = time.monotonic() - 2 * NET.worker_timeout_s
    return epochs(cluster)


async def pair(cluster: Cluster, **ready: Any) -> tuple[FakeWorker, FakeDecode]:
    """A prefill and a decode worker with a path."""
    prefill, decode = cluster.prefill(**ready), cluster.decode(**ready)
    await cluster.until_paths(1)
    return prefill, decode


async def test_word_of_a_worker_s_end_moves_its_streams_at_once(
    start_cluster: StartCluster,
    start_memory: StartMemory,
    tokenizer: tokenizers.Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    prefill, first = await pair(cluster, **memory.named)
    first.most_outputs = 20
    client = Client(cluster, tokenizer)
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    running = asyncio.create_task(client.streamed(**fields, extra_body={"ignore_eos": True}))
    registry = cluster.service.metrics.registry
    await cluster.until(lambda: registry.get_sample_value("baton_generation_tokens_total"), "a token")
    cluster.decode("decode-1", step_s=0.001, **memory.named)
    await cluster.until_paths(2)
    cluster.stop_clockwork()
    first.silent = True
    memory.report_ended(first)
    texts, _, _ = await running
    assert texts == {0: client.expected(PROMPT, max_tokens=300, stop_token_ids=())}
    why = "lost: memory server memory-0 saw its process end; completions that needed it: 1"
    assert "decode worker decode-0" in caplog.text and why in caplog.text
    assert registry.get_sample_value("baton_replays_total", {"reason": "worker_lost"}) == 1
    assert [(gone.worker_id, gone.epoch) for gone in prefill.got(PeerGone)] == [("decode-0", first.epoch)]
    await client.openai.close()


async def test_who_died_along_gets_nothing_of_what_the_dead_had(
    start_cluster: StartCluster, start_memory: StartMemory, tokenizer: tokenizers.Tokenizer
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    prefill, first = await pair(cluster, **memory.named)
    second = cluster.decode("decode-1", **memory.named)
    await cluster.until_paths(2)
    first.mute = second.mute = True
    client = Client(cluster, tokenizer)
    running = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, temperature=0))
    await cluster.until(lambda: prefill.got(PrefillRequest), "the request")
    [bound_to] = [request.decode_worker_id for request in prefill.got(PrefillRequest)]
    assert bound_to == "decode-0"
    cluster.stop_clockwork()
    cluster.decode("decode-2", **memory.named)
    await cluster.until_paths(3)
    for worker in (first, second):
        await asyncio.to_thread(worker.kill)
    await cluster.until_cut_off(first, second)
    memory.report_ended(first)
    assert (await running).choices[0].text == client.expected(PROMPT)
    assert [request.decode_worker_id for request in prefill.got(PrefillRequest)] == ["decode-0", "decode-2"]
    await cluster.until(lambda: cluster.service.pool.find("decode-1") is None, "it is lost, too")
    await client.openai.close()


@pytest.mark.parametrize("naming", ["another's id", "another epoch", "nobody"])
async def test_only_the_server_that_a_worker_named_may_tell_of_its_end(
    start_cluster: StartCluster, start_memory: StartMemory, naming: str
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    named = {
        "another's id": {**memory.named, "memory_server_id": "memory-1"},
        "another epoch": {**memory.named, "memory_server_epoch": 10**6},
        "nobody": {},
    }[naming]
    _, decode = await pair(cluster, **named)
    num_dropped = cluster.service.hub.num_dropped
    memory.report_ended(decode)
    await cluster.until(lambda: cluster.service.hub.num_dropped == num_dropped + 1, "it is refused")
    assert cluster.service.pool.get("decode-0", decode.epoch)


async def test_word_of_who_is_not_there_any_more_changes_nothing(
    start_cluster: StartCluster, start_memory: StartMemory, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    prefill, decode = await pair(cluster, **memory.named)
    decode.say(WorkerLeaving(decode.worker_id, decode.epoch))
    decode.say(WorkerGone(decode.worker_id, decode.epoch, "drained"))
    await cluster.until(lambda: prefill.got(PeerGone), "it is gone")
    decode.silent = True  # a fake lives on
    again = cluster.decode("decode-0", **memory.named)
    await cluster.until(lambda: cluster.service.pool.get("decode-0", again.epoch), "the next one is there")
    num_dropped = cluster.service.hub.num_dropped
    memory.report_ended(decode)
    memory.announcer.report_ended("nobody", 1)
    memory.report_ended(prefill)  # behind those, so that they have been heard
    await cluster.until(lambda: "prefill worker prefill-0" in caplog.text, "the prefill worker's end")
    assert cluster.service.pool.get("decode-0", again.epoch)
    assert not re.search("decode worker decode-0 .* is lost", caplog.text)
    assert cluster.service.hub.num_dropped == num_dropped


async def test_who_was_leaving_when_it_ended_has_not_crashed(
    start_cluster: StartCluster, start_memory: StartMemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    _, decode = await pair(cluster, **memory.named)
    decode.say(WorkerLeaving(decode.worker_id, decode.epoch))
    await cluster.until(lambda: any(worker.draining for worker in cluster.service.pool), "draining")
    memory.report_ended(decode)
    await cluster.until(lambda: "gone after leaving: memory server memory-0" in caplog.text, "its end")


async def test_health_metrics_and_the_log_show_memory_servers(
    start_cluster: StartCluster, start_memory: StartMemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    await pair(cluster, **memory.named)
    cluster.decode("alone")
    await cluster.until_paths(2)
    await cluster.until(lambda: all(server.beat for server in cluster.service.memory_servers), "a heartbeat")
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/health") as response:
        body = await response.json()
    families = {family.name: family for family in cluster.service.metrics.families()}
    assert [sample.value for sample in families["baton_gpu_utilization_ratio"].samples] == [0.87]
    assert [sample.value for sample in families["baton_gpu_temperature_celsius"].samples] == [64.0]
    assert "memory server memory-0" in caplog.text
    assert "owns 3.22 GB of weights and 70 KV blocks, 5.37 GB are left; used by prefill-0, decode-0" in caplog.text
    assert "KV blocks of memory server memory-0" in caplog.text and "KV blocks of its own, shm" in caplog.text
    [shown] = body["memory_servers"]
    assert shown.pop("heartbeat_age_s") < 60.0 and shown.pop("since_s") < 60.0
    assert shown == {
        "id": "memory-0", "epoch": f"{memory.announcer.ready.epoch:x}", "pid": 1, "version": "1",
        "device": "cpu",
        "weights_bytes": 3 * GB, "free_bytes": 5 * GB, "blocks": 70, "free_blocks": 60,
        "cached_blocks": 40, "known_blocks": None, "known_host_blocks": None, "offered_blocks": 2,
        "quarantined_blocks": 1,
        "host_blocks": 30, "host_bytes": 2 * GB, "restored_blocks": 8,
        "gpu_percent": 87, "gpu_celsius": 64,
        "workers": ["prefill-0", "decode-0"],
    }  # fmt: skip
    workers = [worker for role in body["workers"].values() for worker in role]
    named = {worker["id"]: worker["memory_server"] for worker in workers}
    assert named == {"prefill-0": "memory-0", "decode-0": "memory-0", "alone": ""}
    registry = cluster.service.metrics.registry
    for name, value in [
        ("weights_bytes", 3 * GB),
        ("free_bytes", 5 * GB),
        ("workers", 2),
        ("free_blocks", 60),
        ("cached_blocks", 40),
        ("host_blocks", 30),
        ("host_bytes", 2 * GB),
        ("restored_blocks_total", 8),
        ("copied_out_bytes_total", 9),
        ("copied_in_bytes_total", 10),
    ]:
        assert registry.get_sample_value(f"baton_memory_{name}", {"server": "memory-0"}) == value
    for group, kind, num_used, num_bytes in (("0", "full", 9, GB), ("1", "state", 2, 7)):
        labels = {"server": "memory-0", "group": group, "kind": kind}
        assert registry.get_sample_value("baton_memory_group_used_blocks", labels) == num_used
        assert registry.get_sample_value("baton_memory_group_bytes", labels) == num_bytes
    in_use = 2 + 1  # offered, quarantined: what else is leased there is at hand
    assert registry.get_sample_value("baton_kv_usage_ratio") == in_use / (70 + 1000)


async def test_a_memory_server_is_lost_by_silence_and_comes_back_when_it_speaks(
    start_cluster: StartCluster, start_memory: StartMemory, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    _, decode = await pair(cluster, **memory.named)
    memory.silent = True
    await cluster.until(lambda: not age(cluster), "it is lost")
    assert "memory server memory-0" in caplog.text and "net.worker_timeout_s" in caplog.text
    assert cluster.service.pool.get("decode-0", decode.epoch), "that costs its workers nothing"
    memory.silent = False
    await cluster.until(lambda: epochs(cluster), "it is there again")


def test_no_silence_counts_while_the_router_itself_stood_still() -> None:
    now_s, limit_s = 0.0, NET.worker_timeout_s
    servers = MemoryServers(Links(NET, 1, lambda identity, message: True, lambda: now_s))
    servers.on_ready(b"memory-0.1", MemoryReady("memory-0", 1, 1, "1", "cpu"))
    now_s = 1.1 * limit_s
    servers.check()
    assert list(servers)
    servers.on_heartbeat(b"memory-0.1", MemoryHeartbeat("memory-0", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ()))
    for _ in range(4):
        now_s += 0.3 * limit_s
        servers.check()
    assert not list(servers)


async def test_a_killed_memory_server_is_lost_before_it_has_been_silent_for_long(
    start_cluster: StartCluster, start_memory: StartMemory, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    memory.kill()
    await cluster.until(lambda: not epochs(cluster), "it is lost")
    assert "its connection is gone" in caplog.text and "no heartbeat" not in caplog.text
    again = await start_memory(cluster)
    assert epochs(cluster) == [again.announcer.ready.epoch]


def test_one_that_was_asked_to_leave_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    servers = MemoryServers(Links(NET, 1, lambda identity, message: True, lambda: 0.0))
    for epoch, asked_s, how in ((1, -math.inf, "lost"), (2, 0.0, "gone after leaving")):
        servers.on_ready(b"", MemoryReady("memory-0", epoch, 1, "1", "cpu"))
        server = servers.get("memory-0", epoch)
        assert server is not None
        server.asked_to_leave_s = asked_s
        servers.on_unreachable([(server.connection, Knock(1))])
        assert f"{server} is {how}: its connection is gone" in caplog.text
    assert [record.levelname for record in caplog.records if "is gone" in record.message] == ["WARNING", "INFO"]


async def test_a_restarted_router_finds_memory_servers_again(
    start_cluster: StartCluster, start_memory: StartMemory
) -> None:
    cluster = await start_cluster()
    memory = await start_memory(cluster)
    endpoint = cluster.service.hub.endpoint
    await cluster.runner.cleanup()
    again = await start_cluster(endpoint)
    await again.until(lambda: epochs(again) == [memory.announcer.ready.epoch], "it has registered")


async def test_the_older_of_two_of_one_name_says_no_more(
    start_cluster: StartCluster, start_memory: StartMemory, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start_cluster()
    older, newer = await start_memory(cluster), await start_memory(cluster)
    await cluster.until(lambda: older.announcer.is_refused, "the older one hears of it")
    assert "memory.id" in caplog.text
    seen = list(cluster.service.memory_servers)
    await cluster.until(lambda: seen[0].beat, "the newer one is heard")
    assert epochs(cluster) == [newer.announcer.ready.epoch]


async def test_there_is_a_bound_on_memory_servers(
    start_cluster: StartCluster, start_memory: StartMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_servers, "MAX_SERVERS", 1)
    cluster = await start_cluster()
    await start_memory(cluster)
    with contextlib.closing(announcer(cluster.net, "memory-1")) as third:
        third.announce()
        await cluster.until(lambda: tended(third), "it is refused")
    assert len(epochs(cluster)) == 1


def tended(refused: Announcer) -> bool:
    ready = refused.ready
    refused.update(lambda: MemoryHeartbeat(ready.server_id, ready.epoch, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ()))
    return refused.is_refused
