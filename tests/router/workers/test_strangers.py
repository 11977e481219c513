"""What the router makes of messages from somebody else than they name, of a name used twice, and of a flood."""

import asyncio
import logging
from typing import Any

import pytest
import zmq

from common.base.errors import ErrorCode
from common.wire.messages.handoff import KVPathResult
from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady, WorkerEnded
from common.wire.messages.operator import DrainWanted, LoadWanted, RoleChange, Stage
from common.wire.messages.worker import (
    Abort,
    Knock,
    Message,
    PeerGone,
    PrefillRequest,
    Refused,
    RequestFailed,
    Role,
    TokenBatch,
    Welcome,
    WorkerGone,
    WorkerLeaving,
)
from common.wire.transport.sockets import Spoke
from common.wire.values.packing import pack_ids
from router.placement.member import Member
from router.workers import membership
from tests.router.conftest import Client, Cluster, StartCluster
from tests.support.fakes import FakeDecode
from tests.support.messages import heartbeat, kv_path, worker_ready

PROMPT = "the quick brown fox"
ZERO = pack_ids([0])


def state_of(worker: Member) -> tuple[Any, ...]:
    return worker.epoch, worker.draining, worker.beat and worker.beat.num_running, worker.ready.max_model_len


async def test_a_message_in_the_name_of_another_changes_nothing(client: Client, cluster: Cluster) -> None:
    prefill, decode = cluster.workers
    await cluster.until(lambda: all(worker.beat for worker in cluster.service.pool), "heartbeats of both")
    for worker in cluster.workers:
        worker.silent = True  # so that nothing but forgeries is said
    before = {worker.id: state_of(worker) for worker in cluster.service.pool}
    paths = list(cluster.service.pool.paths)
    forgeries: list[Message] = [
        heartbeat(decode.worker_id, decode.epoch, num_running=77),
        heartbeat(decode.worker_id, decode.epoch + 1, num_running=77),
        WorkerLeaving(decode.worker_id, decode.epoch),
        WorkerGone(decode.worker_id, decode.epoch, "dead"),
        RequestFailed(decode.worker_id, decode.epoch, "r", 0, ErrorCode.DRAINING, ""),
        kv_path(prefill.worker_id, decode.worker_id, prefill_epoch=prefill.epoch, epoch=decode.epoch, error="broken"),
        TokenBatch(decode.worker_id, decode.epoch, ("r",), ZERO, ZERO, ZERO, bytes(1)),
        worker_ready("decode-0", Role.DECODE, epoch=99, max_model_len=1),
        MemoryReady("memory-0", 1, 1, "1", "cpu"),
        MemoryHeartbeat("memory-0", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ()),
        WorkerEnded("memory-0", 1, decode.worker_id, decode.epoch),
        DrainWanted("operator", 1, decode.worker_id, 0),
        LoadWanted("operator", 1),
        RoleChange("operator", 1, "decode-0", "prefill-9", Role.PREFILL, Stage.DONE, ""),
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spoke = Spoke(context, cluster.net, cluster.net.router_endpoint, b"decode-9.1")
    num_dropped = cluster.service.hub.num_dropped
    for forgery in forgeries:
        spoke.send(forgery)
    await cluster.until(lambda: cluster.service.hub.num_dropped == num_dropped + len(forgeries), "all are dropped")
    assert not list(spoke.receive()), "nobody is answered"
    assert {worker.id: state_of(worker) for worker in cluster.service.pool} == before
    assert list(cluster.service.pool.paths) == paths
    assert not list(cluster.service.memory_servers)
    spoke.close()
    context.term()
    for worker in cluster.workers:
        worker.silent = False
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)


async def test_messages_that_are_not_for_the_router_are_counted_and_cost_a_line_a_second(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spoke = Spoke(context, cluster.net, cluster.net.router_endpoint, b"p.1")
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            spoke.send(KVPathResult("p", 1, False, ""))
            spoke.send(PeerGone("p", 1))
            spoke.send(Welcome(1))
            spoke.send(Abort("r", 0))
        await cluster.until(lambda: cluster.service.hub.num_dropped >= 2000, "all are dropped")
    spoke.close()
    context.term()
    assert len(caplog.records) < 100


async def test_the_older_of_two_workers_of_one_name_is_told_to_end(cluster: Cluster) -> None:
    older = cluster.workers[1]
    newer = cluster.decode("decode-0")
    await cluster.until(lambda: older.got(Refused), "the older one hears of it")
    assert "worker.id" in older.got(Refused)[0].reason
    await cluster.until(lambda: cluster.service.pool.get("decode-0", newer.epoch), "the newer one is in")
    await cluster.until(lambda: len(list(cluster.service.pool.paths)) == 1, "and has a path")
    assert not newer.got(Refused)


@pytest.mark.parametrize(("ends_first", "num_crashes"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("index", [0, 1])
async def test_a_worker_that_is_replaced_while_it_lives_has_not_crashed(
    client: Client, cluster: Cluster, index: int, ends_first: bool, num_crashes: int
) -> None:
    (prefill, decode), older = cluster.workers, cluster.workers[index]
    assert isinstance(decode, FakeDecode)
    prefill.mute, decode.most_outputs = True, 2
    running = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPT, temperature=0))
    await cluster.until(lambda: prefill.got(PrefillRequest), "the request")
    [completion] = cluster.service.dispatcher.active
    prefill.mute = False
    cluster.stop_clockwork()  # it is the newer one that brings the news
    if ends_first:
        await asyncio.to_thread(older.kill)
        await cluster.until_cut_off(older)
    newer = cluster.prefill("prefill-0") if index == 0 else cluster.decode("decode-0", most_outputs=2)
    await cluster.until(lambda: cluster.service.pool.get(newer.worker_id, newer.epoch), "the newer one is in")
    assert (completion.failures.num_crashes, completion.failures.num_counted) == (num_crashes, num_crashes)
    assert completion.failures.num_returns == 1 - num_crashes
    for worker in cluster.workers:
        if isinstance(worker, FakeDecode):
            worker.most_outputs = 100  # until here it has not got on, which would have been forgiven
    assert (await running).choices[0].text == client.expected(PROMPT)


async def test_a_silent_worker_whose_connection_is_still_up_may_have_crashed(cluster: Cluster) -> None:
    older = cluster.workers[1]
    member = cluster.service.pool.find("decode-0")
    assert member is not None
    older.silent = True
    await cluster.until(lambda: cluster.age(older, 0.7) and member.silent, "it is silent")
    assert cluster.service.pool.find("decode-0") is member
    newer = cluster.decode("decode-0")
    await cluster.until(lambda: cluster.service.pool.get("decode-0", newer.epoch), "the newer one is in")
    assert not member.replaced


async def test_only_a_new_incarnation_of_a_leaving_worker_gets_work_again(client: Client, cluster: Cluster) -> None:
    leaving = cluster.workers[1]
    leaving.say(WorkerLeaving(leaving.worker_id, leaving.epoch))
    await cluster.until(lambda: any(worker.draining for worker in cluster.service.pool), "draining")
    leaving.say(leaving._ready())
    await cluster.until(lambda: len(leaving.got(Welcome)) == 2, "it is welcome")
    assert [worker.draining for worker in cluster.service.pool if worker.id == "decode-0"] == [True]
    await asyncio.to_thread(leaving.kill)
    again = cluster.decode("decode-0")
    await cluster.until(lambda: cluster.service.pool.get("decode-0", again.epoch), "the new incarnation")
    await cluster.until(lambda: len(list(cluster.service.pool.paths)) == 1, "its path")
    response = await client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == client.expected(PROMPT)


async def test_there_is_a_bound_on_workers(start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_WORKERS", 2)
    cluster = await start_cluster()
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    third = cluster.decode("decode-1")
    await cluster.until(lambda: third.got(Refused), "Refused")
    assert "2 workers are registered, which is the limit" in third.got(Refused)[0].reason


async def test_only_workers_of_the_other_kind_hear_that_one_is_gone(cluster: Cluster) -> None:
    other = cluster.prefill("prefill-1")
    await cluster.until_paths(2)
    await asyncio.to_thread(cluster.workers[0].kill)
    await cluster.until(lambda: cluster.workers[1].got(PeerGone), "the decode worker hears of it")
    num_knocks = len(other.got(Knock))
    await cluster.until(lambda: len(other.got(Knock)) > num_knocks + 1, "all that was said before")
    assert not other.got(PeerGone)
