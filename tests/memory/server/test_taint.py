"""A fault of a device: who maps what it may have damaged stops, and who comes gets other memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.base.errors import MemoryLost
from common.memory.client.peer_pool_client import PeerPoolClient
from common.memory.client.shared_pool import SharedPool
from common.wire.messages.memory import BlocksWanted, RegionState
from common.wire.values.kv_layout import KVLayout
from tests.memory.server.test_server import SIZE, Backed, claim, eventually
from tests.support.layouts import one_group
from tests.support.messages import LAYOUT

FAULT = "an illegal memory access was encountered"
OTHER = one_group("another model", 1, 1, 1, 1, "float16")


@pytest.fixture
def backed(tmp_path: Path) -> Iterator[Backed]:
    running = Backed(tmp_path / "memory.sock")
    yield running
    for client in running.clients:
        client.close()
    running.stop()


def pool_of(backed: Backed, name: str, layout: KVLayout = LAYOUT) -> SharedPool:
    client = backed.connect(name)
    if client.claim_weights(layout.fingerprint, "layout", SIZE).state is RegionState.EMPTY:
        client.publish(SIZE)
    return SharedPool(client, client.claim_pool(layout, (9,)))


def hears(pool: SharedPool) -> bool:
    pool.receive()
    return bool(pool.problem)


def test_who_maps_the_same_stops_and_who_comes_gets_other_memory(
    backed: Backed, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, sharer, stranger = pool_of(backed, "decode-0"), pool_of(backed, "prefill-0"), pool_of(backed, "x", OTHER)
    faulty.client.report_fault(FAULT)
    eventually(lambda: hears(sharer))
    assert sharer.is_tainted and sharer.leases.is_exhausted()
    told = f"the device met a fault in decode-0.1, which may have damaged what both map: {FAULT}"
    assert sharer.take_problem() == told
    assert "decode-0.1 met a fault of its device" in caplog.text
    assert f"start again with others: prefill-0.1. The fault: {FAULT}" in caplog.text

    late = pool_of(backed, "decode-1")
    assert late.pool_id not in (faulty.pool_id, sharer.pool_id)
    assert backed.server.regions.num_bytes == 3 * SIZE, "what may be damaged, what is in its place, and another model's"
    assert not hears(late) and not hears(stranger)
    for pool in (faulty, sharer):
        pool.client.close()
    eventually(lambda: backed.server.regions.num_bytes == 2 * SIZE)
    late.client.send(BlocksWanted((8,)))
    eventually(lambda: bool(late.receive() or late.leases.fetch((8,))))


def test_blocks_are_asked_for_and_given_back_as_ever_by_who_has_not_heard_of_it(backed: Backed) -> None:
    faulty, sharer = pool_of(backed, "decode-0"), pool_of(backed, "prefill-0")
    faulty.client.report_fault(FAULT)
    sharer.client.send(BlocksWanted((3,)))
    [pool] = set(backed.server.pools.of_client.values())
    eventually(lambda: pool.index.leases.num_leased.total() == 3)
    eventually(lambda: hears(sharer))


def test_who_waits_for_weights_that_may_be_damaged_starts_again(backed: Backed) -> None:
    filler, waiting = backed.connect("decode-0"), backed.connect("prefill-0")
    claim(filler)
    claim(waiting)
    filler.report_fault(FAULT)
    with pytest.raises(MemoryLost, match="illegal memory access"):
        waiting.wait_filled(SIZE, lambda done, total: None)
    filler.close()
    waiting.close()
    assert claim(backed.connect("prefill-1")).state is RegionState.EMPTY


def test_what_a_peer_pulls_from_there_does_not_count(backed: Backed) -> None:
    faulty = pool_of(backed, "prefill-0")
    peer = PeerPoolClient(backed.path, ("decode-0", 1), faulty.pool_id, LAYOUT)
    eventually(lambda: bool(peer.receive() or peer.claim is not None))
    faulty.client.report_fault(FAULT)
    eventually(lambda: bool(peer.receive() or peer.problem))
    assert "illegal memory access" in peer.problem
    peer.close()


def test_a_fault_of_a_peer_is_one_of_the_pool(backed: Backed) -> None:
    """It maps the pool for reading, which CUDA IPC does not know."""
    pool = pool_of(backed, "prefill-0")
    peer = PeerPoolClient(backed.path, ("decode-0", 1), pool.pool_id, LAYOUT)
    peer.report_fault(FAULT)
    eventually(lambda: hears(pool))
    assert pool.is_tainted
    peer.close()
