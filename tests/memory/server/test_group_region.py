"""A pool of several groups, of a server that runs, in memory that is real."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.base.errors import MemoryLost
from common.device.engine.engine import claimed_pool
from common.memory.client.shared_pool import PromptMessage
from common.wire.messages.memory import BlocksLeased, BlocksWanted, KVOffer, PoolWanted
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from tests.memory.server.test_server import CPU, SIZE, Backed, eventually
from tests.support.allocator import check_owned
from tests.support.layouts import full, state, window


@pytest.fixture
def backed(tmp_path: Path) -> Iterator[Backed]:
    running = Backed(tmp_path / "memory.sock")
    yield running
    for client in running.clients:
        client.close()
    running.stop()


def test_a_pool_of_several_groups_is_one_region_that_all_see_alike(backed: Backed) -> None:
    layout = KVLayout("model", (full(1, 1, 4, 2, "float32"), window(3, 5, 7), state(100)))
    (pool, giver), (seen, taker) = (
        claimed_pool(backed.connect(name), PoolShape(layout, (9, 5, 3)), CPU) for name in ("prefill-0", "decode-0")
    )
    assert pool.shape.num_blocks == seen.shape.num_blocks == (9, 5, 3)

    def is_at_hand() -> bool:
        giver.receive()
        giver.update(layout.nothing, layout.nothing)
        return giver.leases.fetch((2, 1, 1))

    eventually(is_at_hand)
    block_ids = [block_id for of_group in giver.leases.allocate((2, 1, 1)) for block_id in of_group]
    written = {block_id: bytearray(os.urandom(pool.shape.place(block_id).num_bytes)) for block_id in block_ids}
    for block_id, data in written.items():
        pool.block(block_id).copy_(torch.frombuffer(data, dtype=torch.uint8))
    assert giver.offer(("decode-0", 1), ("r", 0), 7, block_ids)
    offers: list[PromptMessage] = []

    def arrived() -> bool:
        offers.extend(taker.receive())
        return bool(offers)

    eventually(arrived)
    [offer] = offers
    assert isinstance(offer, KVOffer)
    taker.accept(offer)
    check_owned(taker.leases, [block_ids])
    assert [len(of_group) for of_group in taker.by_group(offer)] == [2, 1, 1]
    assert all(seen.read_block(block_id) == data for block_id, data in written.items())
    backed.clients[1].close()
    eventually(lambda: backed.server.pools.num_quarantined(1) > 0)


def test_a_pool_is_asked_for_by_its_groups(backed: Backed) -> None:
    layout = KVLayout("model", (full(1, 1, 4, 2, "float32"), state(100)))
    for said in (PoolWanted(layout, (9,)), BlocksWanted((1,)), BlocksWanted((1, 3)), BlocksWanted((1, 1, 1))):
        neighbour, culprit = backed.connect("neighbour"), backed.connect()
        neighbour.claim_pool(layout, (9, 3))
        if isinstance(said, BlocksWanted):
            culprit.claim_pool(layout, (9, 3))
        culprit.send(said)
        with pytest.raises(MemoryLost):
            eventually(lambda culprit=culprit: bool(culprit.receive(BlocksLeased)))  # type: ignore[misc]
        assert neighbour.claim_weights("model", "layout", SIZE).num_bytes == SIZE
        for client in (neighbour, culprit):
            client.close()
        eventually(lambda: not backed.server.clients)
