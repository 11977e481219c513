"""Visits at a gate of a real memory server: whom it refuses, and what ends with a visit."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from common.base.errors import MemoryLost
from common.memory.base.slots import Slots
from common.memory.client.gate_connection import Gate as Place
from common.memory.client.peer_pool_client import LentClaim, PeerMessage, PeerPoolClient
from common.memory.client.shared_pool import SharedPool
from common.memory.gates.gate import Gate
from common.memory.server.report import usage
from common.settings.config import NetSection
from common.wire.messages.memory import KVOffer
from tests.memory.parties import leases_of
from tests.memory.server.test_server import Backed
from tests.support.layouts import take
from tests.support.messages import LAYOUT
from tests.support.nixl import has_nixl

pytestmark = [pytest.mark.medium, pytest.mark.skipif(not has_nixl(), reason="nixl is not installed")]

WAIT_S = 30.0


class Visits:
    """A gate in this process, at a memory server with a pool."""

    def __init__(self, backed: Backed, directory: Path, net: NetSection) -> None:
        self.backed, self.net = backed, net
        self.home = backed.connect("prefill-0")
        claim = self.home.claim_pool(LAYOUT, (9,))
        self.pool, self.pool_id = SharedPool(self.home, claim, clock=lambda: 0.0), claim.pool_id
        self.gate = Gate(backed.path, f"ipc://{directory}/gate", net)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients: list[PeerPoolClient] = []

    def visit(self, pool_id: int = 0, net: NetSection | None = None, slots: Slots | None = None) -> PeerPoolClient:
        place = Place(self.gate.hub.endpoint, net or self.net, self.context, slots)
        worker = "d", len(self.clients)
        self.clients.append(PeerPoolClient(place, worker, pool_id or self.pool_id, LAYOUT))
        return self.clients[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            self.gate.turn()
            for client in self.clients:
                client.poll()
            assert time.monotonic() < end_s

    def open(self, slots: Slots | None = None) -> PeerPoolClient:
        client = self.visit(slots=slots)
        self.until(lambda: client.claim is not None)
        return client

    def offered(self, client: PeerPoolClient, name: str) -> KVOffer:
        """Return an offer of three blocks, made at home and arrived at a visitor."""

        def has() -> bool:
            self.pool.update((3,), (0,))
            self.pool.receive()
            return self.pool.leases.fetch((3,))

        self.until(has)
        target = "d", self.clients.index(client)
        assert self.pool.offer(target, (name, 0), 7, take(self.pool.leases, 3))
        offers: list[PeerMessage] = []

        def arrived() -> bool:
            self.pool.receive()
            offers.extend(client.receive())
            return bool(offers)

        self.until(arrived)
        [offer] = offers
        assert isinstance(offer, KVOffer)
        return offer

    def num_kept(self) -> int:
        """Blocks that are neither free nor leased at home."""
        num_blocks, num_free, *_ = usage(self.backed.server.pools)
        return num_blocks - num_free - len(leases_of(self.pool.leases))

    def num_peers(self) -> int:
        return sum(client.is_peer for client in self.backed.server.clients.values())

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.gate.close()
        self.context.destroy(linger=0)


@pytest.fixture
def visits(tmp_path: Path) -> Iterator[Visits]:
    tmp_path.chmod(0o700)
    backed = Backed(tmp_path / "memory.sock")
    visits = Visits(backed, tmp_path, NetSection(ucx_transports="tcp"))
    yield visits
    visits.close()
    visits.home.close()
    backed.stop()


def test_who_wants_what_is_not_here_is_told(visits: Visits) -> None:
    stranger = visits.visit(pool_id=visits.pool_id + 1)
    foreign = visits.visit(net=NetSection(ucx_transports="rc"))
    visits.until(lambda: bool(stranger.problem and foreign.problem))
    assert "there is no pool" in stranger.problem
    assert "net.ucx_transports: 'rc' there, 'tcp' here" in foreign.problem
    assert not visits.gate.visits and not visits.num_peers()


def test_a_gpus_pool_is_lent_through_staging_only(visits: Visits, monkeypatch: pytest.MonkeyPatch) -> None:
    [pool] = visits.backed.server.pools.pools.values()
    monkeypatch.setattr(pool.memory.__class__, "descriptor", None, raising=False)
    monkeypatch.delattr(pool.memory, "descriptor")
    refused = visits.visit()
    visits.until(lambda: bool(refused.problem))
    assert "the pool is in a GPU's memory" in refused.problem


def test_blocks_are_staged_on_a_socket_of_its_own_and_a_wrong_message_ends_the_visit(visits: Visits) -> None:
    [group] = LAYOUT.groups
    slots = Slots(2, 2 * group.block_bytes)
    client = visits.open(slots)
    claim = client.claim
    assert isinstance(claim, LentClaim) and claim.num_lent_bytes == slots.num_bytes == 4 * group.block_bytes
    assert claim.slots == slots and claim.open_stager is not None
    stager, numbers = claim.open_stager(), list[int]()
    for number, slot in ((7, 1), (8, 0)):
        stager.stage(number, slot, [3, 1])

    def are_staged() -> bool:
        numbers.extend(stager.staged())
        return sorted(numbers) == [7, 8]

    visits.until(are_staged)
    stager.stage(9, 2, [3])
    visits.until(lambda: bool(client.problem))
    assert not visits.gate.visits
    stager.stage(10, 0, [3])

    def is_told() -> bool:
        try:
            return not all(True for _ in stager.staged())
        except MemoryLost as lost:
            return "no such visit" in str(lost)

    visits.until(is_told)
    stager.close()


def test_a_visit_ends_with_a_farewell_with_silence_and_with_its_lender(visits: Visits) -> None:
    leaver, mute, unlucky = visits.open(), visits.open(), visits.open()
    assert len(visits.gate.visits) == visits.num_peers() == 3
    *_, last = visits.gate.visits.values()
    assert last.lending is not None
    last.lending.process.kill()
    visits.until(lambda: bool(unlucky.problem))
    assert "the process that lends it ended with status -9" in unlucky.problem
    visits.clients.remove(leaver)
    leaver.close()
    visits.until(lambda: visits.num_peers() == 1)
    assert not mute.problem
    visits.gate.lease_s = 0.0
    visits.until(lambda: bool(mute.problem))
    assert "not a word for" in mute.problem
    visits.until(lambda: not visits.num_peers())


def test_offered_blocks_are_a_visitors_until_it_frees_them_or_its_visit_ends(visits: Visits) -> None:
    client = visits.open()
    first = visits.offered(client, "first")
    client.accept(first)
    visits.until(lambda: visits.num_kept() == 3)
    client.free(first)
    visits.until(lambda: not visits.num_kept())
    second = visits.offered(client, "second")
    visits.offered(client, "third")
    client.accept(second)
    visits.until(lambda: usage(visits.backed.server.pools)[2] == 3)  # offered: the third
    assert visits.num_kept() == 6
    [visit] = visits.gate.visits.values()
    assert visit.lending is not None
    visit.lending.process.kill()
    visits.until(lambda: not visits.num_kept())
    assert client.problem


def test_a_worker_of_a_former_gate_learns_at_once_that_its_visit_is_unknown(visits: Visits) -> None:
    client = visits.open()
    [visit] = visits.gate.visits.values()
    visits.gate.visits.clear()  # as if it had started again
    client.ask()
    visits.until(lambda: bool(client.problem))
    assert "knows no such visit" in client.problem
    visit.close("the test ends")
