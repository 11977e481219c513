"""Pools of decode workers are proven before anything is taken there, again after each loss, and never waited for."""

from collections.abc import Generator
from typing import cast

import pytest

from common.base.errors import TransferFailed
from common.memory.client.peer_pool_client import PeerPoolClient
from common.serving.worker.peer_servers import PeerServer, PeerServers
from common.wire.messages.handoff import KVPoolExport
from prefill_worker.reply_pools import FIRST_PAUSE_S, LONGEST_PAUSE_S, ReplyPools
from tests.decode_worker.bench import FakePeer
from tests.support.messages import pool_export

SPEED = 7.0


class FakePeers:
    """A proof takes three turns; `broken` are workers to which there is no way."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.proven: list[str] = []
        self.num_open = 0
        self.is_closed = False

    def prove(self, export: KVPoolExport) -> Generator[None, None, tuple[PeerServer, float]]:
        self.num_open += 1
        try:
            for _ in range(2):
                yield
            if export.worker_id in self.broken:
                raise TransferFailed("there is no way")
        except BaseException:
            self.num_open -= 1
            raise
        self.proven.append(export.worker_id)
        return PeerServer(cast(PeerPoolClient, FakePeer(export.pool_id))), SPEED

    def leave(self, server: PeerServer) -> None:
        self.num_open -= 1

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, *, is_on: bool = True) -> None:
        self.now_s, self.peers = 100.0, FakePeers()
        self.pools = ReplyPools(cast(PeerServers, self.peers), clock=lambda: self.now_s, is_on=is_on)

    def turns(self, count: int = 10, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.now_s += seconds / count
            self.pools.prove_next()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_pools_are_proven_one_after_the_other_and_known_by_incarnation(rig: Rig) -> None:
    for name in ("d", "e", "d"):
        rig.pools.add(pool_export(name))
    rig.turns(3)
    assert rig.peers.proven == ["d"] and rig.peers.num_open == 1, "one at a time"
    rig.turns(3)
    assert rig.peers.proven == ["d", "e"] and not rig.pools.is_proving
    found = rig.pools.find("d", 1)
    assert found is not None and found.gb_per_s == SPEED
    assert rig.pools.find("d", 2) is None and rig.pools.find("f", 1) is None
    rig.pools.add(pool_export("d"))
    rig.turns()
    assert rig.peers.proven == ["d", "e"], "it is known"


def test_a_path_that_fails_is_tried_again_ever_less_often(rig: Rig) -> None:
    rig.peers.broken.add("d")
    rig.pools.add(pool_export("d"))
    rig.turns()
    assert rig.pools.find("d", 1) is None and not rig.peers.num_open
    rig.turns(20, seconds=0.9 * FIRST_PAUSE_S)
    assert not rig.pools.is_proving
    rig.turns(2000, seconds=10 * LONGEST_PAUSE_S)
    assert rig.pools.by_id["d"].pause_s == LONGEST_PAUSE_S
    rig.peers.broken.clear()
    rig.turns(40, seconds=1.5 * LONGEST_PAUSE_S)
    assert rig.pools.find("d", 1) is not None


def test_who_leaves_amid_its_proof_or_later_leaves_nothing(rig: Rig) -> None:
    rig.pools.add(pool_export("d"))
    rig.turns(1)
    rig.pools.leave("d", 2)
    assert rig.peers.num_open == 1, "that is another one"
    rig.pools.leave("d", 1)
    assert not rig.peers.num_open and not rig.pools.is_proving
    rig.pools.add(pool_export("d"))
    rig.turns()
    rig.pools.add(pool_export("d", epoch=2))
    assert not rig.peers.num_open and rig.pools.find("d", 1) is None
    rig.turns()
    assert rig.pools.find("d", 2) is not None


def test_a_visit_that_is_lost_is_made_again(rig: Rig) -> None:
    for name in ("d", "e"):
        rig.pools.add(pool_export(name))
    rig.turns()
    lost = rig.pools.by_id["d"].server
    assert lost is not None
    rig.pools.lose(lost)
    rig.turns()
    assert rig.pools.find("d", 1) is None and rig.pools.find("e", 1) is not None
    rig.turns(40, seconds=1.5 * FIRST_PAUSE_S)
    assert rig.pools.find("d", 1) is not None


def test_the_end_amid_a_proof_ends_it(rig: Rig) -> None:
    rig.pools.add(pool_export("d"))
    rig.turns(1)
    rig.pools.close()
    assert not rig.peers.num_open and rig.peers.is_closed


def test_where_nothing_is_to_be_taken_nobody_is_visited() -> None:
    rig = Rig(is_on=False)
    rig.pools.add(pool_export("d"))
    assert not rig.pools.is_proving
    rig.turns()
    assert rig.pools.find("d", 1) is None and not rig.peers.num_open and not rig.peers.proven
    rig.pools.leave("d", 1)
    rig.pools.close()
