"""Pools are proven bit by bit: nobody waits for a copy, and whatever happens meanwhile leaves no block behind."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import zmq
from msgspec import structs

from common.base.errors import MemoryLost
from common.device.engine.engine import Engine
from common.kv import proof
from common.memory.base.host import host_id
from common.memory.base.pattern import pattern
from common.memory.base.slots import slots_for
from common.memory.client.client import PoolClaim
from common.serving.worker import peer_servers as peer_servers
from common.serving.worker.peer_servers import PeerServers
from common.settings.config import Config
from common.settings.memory_sections import KVSection
from common.wire.messages.handoff import KVPathResult
from common.wire.messages.worker import KVPathReport, Message
from common.wire.transport.sockets import Hub
from common.wire.values.pool_shape import PoolShape
from decode_worker.arrivals.sources import Sources
from tests.decode_worker.bench import FakePeer, FakePool
from tests.support.layouts import allocator_of
from tests.support.messages import LAYOUT, pool_export

OURS = pool_export("d", pool_id=77, memory_socket="/nowhere/ours.sock", host=host_id())


class Pool(dict[int, Any]):
    """This worker's memory."""

    layout, shape = LAYOUT, PoolShape(LAYOUT, (9,))
    blocks = (SimpleNamespace(device=SimpleNamespace(type="cpu")),)

    def read_block(self, block_id: int) -> bytes:
        return bytes(self[block_id])


class Rig:
    """Sources of a decode worker; the pools of prefill workers copy when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocator, self.pools, self.said = allocator_of(8), dict[str, FakePool](), list[Message]()
        self.reports: list[KVPathReport] = []
        self.clients: list[FakePeer] = []
        monkeypatch.setattr(peer_servers, "PeerPoolClient", self._visit)
        transport = SimpleNamespace(name="shm", open_peer=self._open)
        shared = SimpleNamespace(pool_id=77, client=SimpleNamespace(path=Path("/nowhere/ours.sock"), gate=""))
        engine = SimpleNamespace(
            pool=Pool(), allocator=self.allocator, transport=transport, device=torch.device("cpu"), shared=shared
        )
        hub = cast(Hub, SimpleNamespace(send=lambda identity, message: self.said.append(message)))
        poller = cast(zmq.Poller, SimpleNamespace(register=lambda *_: None, unregister=lambda _: None))
        self.peers = PeerServers(cast(Engine, engine), ("d", 1), poller, Config())
        self.sources = Sources(
            cast(Engine, engine), self.peers, hub, lambda report: self.reports.append(cast(KVPathReport, report))
        )

    def meet(self, worker_id: str, epoch: int = 1, pool_id: int = 0) -> None:
        self.sources.add(worker_id.encode(), pool_export(worker_id, epoch, pool_id=pool_id or ord(worker_id[0])))

    def tend(self, num_turns: int = 50) -> list[KVPathReport]:
        return [report for _ in range(num_turns) for report in self._tended()]

    def _tended(self) -> list[KVPathReport]:
        for server in self.peers.check(lambda server: False):
            self.sources.lose(server)
        self.sources.prove_next()
        reports, self.reports = self.reports, []
        return reports

    def end_copies(self) -> list[KVPathReport]:
        """Every pull ends a turn after it was begun."""
        reports = []
        for _ in range(10):
            for pool in self.pools.values():
                pool.close()
            reports += self.tend(1)
        return reports

    def is_idle(self) -> bool:
        return self.allocator.num_free == self.allocator.capacity

    def silent(self, pool_id: int) -> FakePeer:
        self.clients.append(FakePeer(pool_id))
        return self.clients[-1]

    def _visit(self, path: object, worker: object, pool_id: int, layout: object) -> FakePeer:
        peer = FakePeer(pool_id)
        peer.claim = PoolClaim(b"", None, 0, pool_id, PoolShape(LAYOUT, (9,)))
        self.clients.append(peer)
        return peer

    def _open(self, claim: PoolClaim, worker_id: str, device: object) -> FakePool:
        pool = self.pools[worker_id] = FakePool()
        pool.memory[0] = pattern(claim.pool_id, 0, LAYOUT.groups[0].block_bytes)
        return pool


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_pool_is_proven_while_others_go_on_and_each_in_its_turn(rig: Rig) -> None:
    for worker_id in ("p", "q", "p"):
        rig.meet(worker_id)
    assert rig.tend() == [] and list(rig.pools) == ["p"], "its copy is under way"
    reports = rig.end_copies() + rig.end_copies()
    assert [(report.prefill_worker_id, report.error) for report in reports] == [("p", ""), ("q", "")]
    assert all(report.gb_per_s > 0 for report in reports)
    assert rig.said == [KVPathResult("d", 1, False, ""), OURS] * 2, "where our pool is, as replies are there"
    assert rig.is_idle() and set(rig.sources.by_id) == {"p", "q"}
    num_copies = len(rig.pools["p"].copies)
    rig.meet("p")
    assert rig.tend() == reports[:1] and len(rig.pools["p"].copies) == num_copies, "it is only answered again"


def test_a_copy_that_does_not_end_fails_the_proof_in_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.meet("p")
    assert rig.tend() == []
    monkeypatch.setattr(proof, "PROOF_TIMEOUT_S", -1.0)
    rig.sources.forget("p", 1)
    rig.meet("p")
    [report] = rig.tend()
    assert "did not arrive within" in report.error and report.gb_per_s == 0.0
    assert rig.said == [KVPathResult("d", 1, False, report.error)]
    assert rig.is_idle() and not rig.sources.by_id


def test_a_pull_that_cannot_begin_and_a_pattern_that_is_another_are_reported(rig: Rig) -> None:
    rig.meet("p", 2)
    rig.tend(1)
    rig.pools["p"].memory[0] = pattern(3, 0, LAYOUT.groups[0].block_bytes)
    assert ["other bytes" in report.error for report in rig.end_copies()] == [True]
    rig.meet("p", 2)
    rig.tend(1)
    rig.pools["p"].copies[0].is_broken = True
    assert ["the way is blocked" in report.error for report in rig.tend()] == [True]


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 4])
def test_a_worker_that_dies_amid_its_proof_leaves_nothing(num_turns: int, rig: Rig) -> None:
    rig.meet("p")
    for _ in range(num_turns):
        rig.tend(1)
        for pool in rig.pools.values():
            for copy in pool.copies:
                copy.end()
    assert rig.sources.forget("p", 1) is None
    assert rig.is_idle() and not rig.sources.proofs
    rig.meet("p", 2)
    assert [report.prefill_epoch for report in rig.end_copies()] == [2]
    rig.sources.forget("p", 2)
    rig.tend(1)
    assert not rig.peers.by_pool and all(peer.is_closed for peer in rig.clients)


def test_workers_of_one_pool_share_a_visit_which_lasts_as_long_as_one_is_there(rig: Rig) -> None:
    for worker_id in ("p", "q"):
        rig.meet(worker_id, pool_id=5)
        assert [report.error for report in rig.end_copies()] == [""]
    assert len(rig.clients) == 1 and list(rig.pools) == ["p"]
    rig.sources.forget("p", 1)
    rig.tend(1)
    assert not rig.clients[0].is_closed
    rig.sources.forget("q", 1)
    rig.tend(1)
    assert rig.clients[0].is_closed and not rig.peers.by_pool


def test_a_server_that_does_not_say_where_its_pool_is_is_no_path(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_servers, "GREETING_S", -1.0)
    monkeypatch.setattr(peer_servers, "PeerPoolClient", lambda path, worker, pool_id, layout: rig.silent(pool_id))
    rig.meet("p")
    assert ["not a word for" in report.error for report in rig.tend()] == [True]
    assert not rig.peers.by_pool and rig.is_idle()

    def nobody(*_: object) -> FakePeer:
        raise MemoryLost("memory server /nowhere: No such file or directory")

    monkeypatch.setattr(peer_servers, "PeerPoolClient", nobody)
    rig.meet("p")
    assert ["both workers need to reach it" in report.error for report in rig.tend()] == [True]


@pytest.mark.parametrize("host", ["another", host_id("10.0.0.9")], ids=["machine", "address"])
def test_a_pool_on_another_host_is_read_through_its_gate_by_nixl_or_not_at_all(
    host: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = pool_export("p", 1, pool_id=5, host=host)
    rig.sources.add(b"p", there)
    assert ["its memory server has no gate" in report.error for report in rig.tend()] == [True]
    made = SimpleNamespace(name="nixl", open_peer=rig._open)
    monkeypatch.setattr(peer_servers, "make_transport", lambda name, device: made)
    there = structs.replace(there, gate="tcp://there:1")
    rig.peers.config = Config(kv=KVSection(min_gb_per_s=999.0))
    rig.sources.add(b"p", there)
    [report] = rig.end_copies()
    assert "GB/s by nixl tcp, less than kv.min_gb_per_s = 999" in report.error and rig.is_idle()
    rig.peers.config = Config(kv=KVSection(min_gb_per_s=0.0))
    rig.tend(1)
    rig.sources.add(b"p", there)
    [report] = rig.end_copies()
    assert (report.error, report.transport) == ("", "nixl tcp")


def test_either_side_may_choose_nixl_and_a_gpus_pool_is_read_through_staging(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = []
    monkeypatch.setattr(peer_servers, "make_transport", lambda *_: SimpleNamespace(name="nixl", open_peer=rig._open))

    def visited(place: Any, *visit: Any) -> FakePeer:
        slots.append(place.slots)
        return rig._visit(place, *visit)

    monkeypatch.setattr(peer_servers, "PeerPoolClient", visited)
    monkeypatch.setattr(peer_servers, "describe_device", lambda _: ("", ""))
    engine = cast(Any, rig.peers.engine)
    for number, (here, there, device, always) in enumerate(
        (("shm", "nixl", "cpu", False), ("nixl", "shm", "cpu", False), ("nixl", "nixl", "cpu", True),
         ("nixl", "cuda_ipc", "cuda", False))
    ):  # fmt: skip
        engine.transport, engine.device = SimpleNamespace(name=here), torch.device(device)
        rig.peers.config = Config(kv=KVSection(min_gb_per_s=0.0, always_stage=always))
        rig.sources.add(
            f"p{number}".encode(), pool_export(f"p{number}", 1, pool_id=number + 5, transport=there, gate="tcp://x:1")
        )
        [report] = rig.end_copies()
        assert (report.error, report.transport) == ("", "nixl tcp")
    usual = slots_for(LAYOUT)
    assert slots == [None, None, usual, usual]


def test_a_late_pull_of_a_proof_keeps_its_blocks_until_it_is_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.meet("p")
    rig.tend(1)
    [copy] = rig.pools["p"].copies
    monkeypatch.setattr(rig.pools["p"], "close", lambda: None)
    monkeypatch.setattr(proof, "PROOF_TIMEOUT_S", -1.0)
    rig.sources.forget("p", 1)
    rig.tend(3)
    assert not rig.is_idle(), "it may still write"
    copy.end()
    rig.tend(1)
    assert rig.is_idle()


def test_a_server_that_is_lost_amid_a_proof_or_after_it_is_no_path_any_more(rig: Rig) -> None:
    rig.meet("p")
    rig.tend(1)
    rig.clients[0].problem = "it closed the connection"
    assert [report.error for report in rig.tend()] == ["shm from p: it closed the connection"]
    rig.meet("p")
    assert [report.error for report in rig.end_copies()] == [""]
    rig.clients[1].problem = "gone"
    assert [report.error for report in rig.tend()] == ["gone"] and not rig.sources.by_id
    assert rig.said[-1] == KVPathResult("d", 1, False, "gone") and rig.is_idle()
