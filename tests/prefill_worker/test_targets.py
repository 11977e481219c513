"""Decode workers are offered the pool until they can pull from it."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from common.settings.config import NetSection
from common.wire.messages.handoff import KVPathResult
from common.wire.messages.worker import DecodePeer
from prefill_worker.targets import LONGEST_PAUSE_S, Targets
from tests.support.fakes import free_endpoint
from tests.support.messages import pool_export

NOBODY = free_endpoint()


class Rig:
    """Targets with a clock moved by hand, of which one is a decode worker that nobody plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.offers_s: list[float] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        monkeypatch.setattr("prefill_worker.targets.time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.targets = Targets(self.context, NetSection(), pool_export(), zmq.Poller())
        self.targets.join(DecodePeer("d", 1, NOBODY))
        spoke = self.targets.by_id["d"].spoke
        monkeypatch.setattr(spoke, "send", lambda message: self.offers_s.append(self.now_s))

    def answer(self, error: str, epoch: int = 1) -> None:
        self.targets.handle_result(KVPathResult("d", epoch, False, error))

    def pass_time(self, seconds: float) -> list[float]:
        """Turn the loop a few times a second; returns when the pool was offered."""
        begin_s, already = self.now_s, len(self.offers_s)
        while self.now_s < begin_s + seconds:
            self.targets.export_pool()
            self.now_s += 0.25
        return [offered_s - begin_s for offered_s in self.offers_s[already:]]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.targets.close()
    rig.context.destroy(linger=0)


def test_the_pool_is_offered_again_ever_less_often_until_it_can_be_pulled_from(rig: Rig) -> None:
    assert rig.pass_time(2.0) == [0.0, 1.0], "an offer or its answer may be lost"
    rig.answer("no room just now")
    assert rig.targets.proven("d", 1) is None
    assert rig.pass_time(30.0) == [1.0, 5.0, 13.0, 29.0]
    assert len(rig.pass_time(10 * LONGEST_PAUSE_S)) == 10
    rig.answer("", epoch=2)
    assert rig.targets.proven("d", 2) is None, "another incarnation said so"
    rig.answer("")
    assert rig.targets.proven("d", 1) is not None
    assert rig.pass_time(1000.0) == []


def test_a_router_that_names_a_target_again_waits_for_its_report(rig: Rig) -> None:
    rig.pass_time(1.0)
    rig.answer("")
    rig.targets.join(DecodePeer("d", 1, NOBODY))
    assert rig.targets.proven("d", 1) is not None
    assert rig.pass_time(2.0) == [0.0, 1.0]
