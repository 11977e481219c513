"""Pools are proven bit by bit: nobody waits for a copy, and whatever happens meanwhile leaves no block behind."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.device.engine import Engine
from common.kv import proof
from common.memory.pattern import pattern
from common.wire.handoff_messages import KVPathResult, KVPoolExport
from common.wire.messages import KVPathReport, Message
from common.wire.pool_shape import PoolShape
from common.wire.sockets import Hub
from decode_worker.sources import Sources
from tests.decode_worker.bench import FakePool
from tests.layouts import allocator_of
from tests.messages import LAYOUT, pool_export


class Pool(dict[int, Any]):
    """This worker's memory."""

    layout, shape = LAYOUT, PoolShape(LAYOUT, (9,))
    blocks = (SimpleNamespace(device=SimpleNamespace(type="cpu")),)

    def read_block(self, block_id: int) -> bytes:
        return bytes(self[block_id])


class Rig:
    """Sources of a decode worker; the pools of prefill workers copy when the test says so."""

    def __init__(self) -> None:
        self.allocator, self.pools, self.said = allocator_of(8), dict[str, FakePool](), list[Message]()
        transport = SimpleNamespace(name="shm", open_peer=self._open)
        engine = SimpleNamespace(pool=Pool(), allocator=self.allocator, transport=transport, device=None, shared=None)
        hub = cast(Hub, SimpleNamespace(send=lambda identity, message: self.said.append(message)))
        self.sources = Sources(cast(Engine, engine), hub, "d", 1)

    def meet(self, worker_id: str, epoch: int = 1) -> None:
        self.sources.meet(worker_id.encode(), pool_export(worker_id, epoch))

    def tend(self, num_turns: int = 50) -> list[KVPathReport]:
        reports = [self.sources.tend() for _ in range(num_turns)]
        return [report for report in reports if report is not None]

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

    def _open(self, export: KVPoolExport, device: object) -> FakePool:
        pool = self.pools[export.worker_id] = FakePool()
        pool.memory[0] = pattern(export.pool_id, 0, LAYOUT.groups[0].block_bytes)
        return pool


def test_a_pool_is_proven_while_others_go_on_and_each_in_its_turn() -> None:
    rig = Rig()
    for worker_id in ("p", "q", "p"):
        rig.meet(worker_id)
    assert rig.tend() == [] and list(rig.pools) == ["p"], "its copy is under way"
    reports = rig.end_copies() + rig.end_copies()
    assert [(report.prefill_worker_id, report.error) for report in reports] == [("p", ""), ("q", "")]
    assert all(report.gb_per_s > 0 for report in reports)
    assert rig.said == [KVPathResult("d", 1, False, "")] * 2
    assert rig.is_idle() and set(rig.sources.by_id) == {"p", "q"}
    num_copies = len(rig.pools["p"].copies)
    rig.meet("p")
    assert rig.tend() == reports[:1] and len(rig.pools["p"].copies) == num_copies, "it is only answered again"


def test_a_copy_that_does_not_end_fails_the_proof_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.meet("p")
    assert rig.tend() == []
    monkeypatch.setattr(proof, "PROOF_TIMEOUT_S", -1.0)
    rig.sources.forget("p", 1)
    rig.meet("p")
    [report] = rig.tend()
    assert "did not arrive within" in report.error and report.gb_per_s == 0.0
    assert rig.said == [KVPathResult("d", 1, False, report.error)]
    assert rig.is_idle() and not rig.sources.by_id


def test_a_pull_that_cannot_begin_and_a_pattern_that_is_another_are_reported() -> None:
    rig = Rig()
    rig.meet("p", 2)
    rig.tend(1)
    rig.pools["p"].memory[0] = pattern(3, 0, LAYOUT.groups[0].block_bytes)
    assert ["other bytes" in report.error for report in rig.end_copies()] == [True]
    rig.meet("p", 2)
    rig.tend(1)
    rig.pools["p"].copies[0].is_broken = True
    assert ["the way is blocked" in report.error for report in rig.tend()] == [True]


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 4])
def test_a_worker_that_dies_amid_its_proof_leaves_nothing(num_turns: int) -> None:
    rig = Rig()
    rig.meet("p")
    for _ in range(num_turns):
        rig.tend(1)
        for pool in rig.pools.values():
            pool.copies[-1].end()
    assert rig.sources.forget("p", 1) is None
    assert rig.is_idle() and not rig.sources.meetings
    rig.meet("p", 2)
    assert [report.prefill_epoch for report in rig.end_copies()] == [2]
