"""Who pulls from a pool that is not its own: what it may claim, for how long, and that it hurts nobody there."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.base.errors import MemoryLost
from common.memory.base import channel as channel_module
from common.memory.base.channel import Channel
from common.memory.client.connection import ASK_S, MAX_UNANSWERED
from common.memory.client.peer_pool_client import PeerMessage, PeerPoolClient
from common.memory.client.shared_pool import PromptMessage, SharedPool
from common.memory.server import server as server_module
from common.memory.server.report import num_cached, usage
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    MemoryKnock,
    MemoryMessage,
    PoolWanted,
    PromptBlocks,
    WeightsWanted,
)
from common.wire.values.fields import DIGEST_BYTES
from common.wire.values.packing import pack_ids, unpack_ids
from tests.memory.parties import leases_of
from tests.memory.server.test_server import Backed, eventually
from tests.support.layouts import take
from tests.support.messages import LAYOUT

NUM_BLOCKS = 9


class House:
    """A memory server, a prefill worker whose pool is there, and a decode worker that is a peer."""

    def __init__(self, backed: Backed) -> None:
        self.backed = backed
        self.home = backed.connect("prefill-0")
        claim = self.home.claim_pool(LAYOUT, (NUM_BLOCKS,))
        self.pool = SharedPool(self.home, claim, clock=lambda: 0.0)  # it never knocks: who does is killed if it hangs
        self.answers: list[PromptMessage] = []
        self.peer = self.visit()

    def visit(self, name: str = "decode-0") -> PeerPoolClient:
        peer = PeerPoolClient(self.backed.path, (name, 1), self.pool.pool_id, LAYOUT)

        def is_there() -> bool:
            peer.poll()
            return peer.claim is not None

        eventually(is_there)
        return peer

    def offer(self, name: str = "r", num_blocks: int = 2) -> KVOffer:
        """Made, and arrived at the peer."""

        def has() -> bool:
            self.pool.update((num_blocks,), (0,))
            self.told()
            return self.pool.leases.fetch((num_blocks,))

        eventually(has)
        block_ids = take(self.pool.leases, num_blocks)
        assert self.pool.offer(("decode-0", 1), (name, 0), 7, block_ids)
        offer = self.hear()
        assert isinstance(offer, KVOffer)
        return offer

    def hear(self) -> PeerMessage:
        """What the peer is told next of blocks."""
        said: list[PeerMessage] = []

        def arrived() -> bool:
            self.told()
            said.extend(self.peer.receive())
            return bool(said)

        eventually(arrived)
        return said[0]

    def seal(self, digests: list[bytes]) -> list[int]:
        """A text of the worker at home, which is over: its blocks can be found."""

        def has() -> bool:
            self.pool.update((len(digests),), (0,))
            self.told()
            return self.pool.leases.fetch((len(digests),))

        eventually(has)
        block_ids = take(self.pool.leases, len(digests))
        self.pool.leases.seal(block_ids, digests)
        self.pool.leases.free(block_ids)
        self.pool.update((0,), (0,))
        eventually(lambda: num_cached(self.backed.server.pools) == len(digests))
        return block_ids

    def told(self) -> list[PromptMessage]:
        """What the prefill worker was told of its offers."""
        self.answers += self.pool.receive()
        return self.answers

    def usage(self) -> tuple[int, ...]:
        return tuple(usage(self.backed.server.pools))

    def num_claimed(self) -> int:
        """Blocks that are neither free nor offered nor the prefill worker's."""
        num_blocks, num_free, num_offered, num_quarantined = self.usage()
        return num_blocks - num_free - num_offered - num_quarantined - len(leases_of(self.pool.leases))

    def is_let_go(self) -> bool:
        self.peer.poll()
        return bool(self.peer.problem)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    backed = Backed(tmp_path / "memory.sock")
    house = House(backed)
    yield house
    house.peer.close()
    for client in backed.clients:
        client.close()
    backed.stop()


def test_a_peer_reads_what_is_offered_and_then_gives_it_back(house: House) -> None:
    offer = house.offer()
    block_id, size = unpack_ids(offer.block_ids)[1], LAYOUT.groups[0].block_bytes
    [pool] = house.backed.server.pools.pools.values()
    pool.memory.write(block_id * size, b"\x07" * size)
    house.peer.receive_offer(offer)
    eventually(lambda: house.told() == [KVReceived("r", 0)])
    house.peer.accept(offer)
    eventually(lambda: house.num_claimed() == 2)
    claim = house.peer.claim
    assert claim is not None and claim.descriptor is not None
    assert (claim.shape.num_blocks, claim.num_bytes) == ((NUM_BLOCKS,), NUM_BLOCKS * size)
    assert os.pread(claim.descriptor, size, block_id * size) == b"\x07" * size
    house.peer.free(offer)
    eventually(lambda: house.num_claimed() == 0)
    second = house.offer("s")
    house.peer.decline(second)
    eventually(lambda: house.told() == [KVReceived("r", 0), KVDeclined("s", 0)])
    assert house.usage()[2] == 0
    assert house.backed.server._heartbeat().worker_ids == ("prefill-0",), "it has none of this server's memory"


def test_what_is_offered_outlives_who_offered_it(house: House) -> None:
    offer = house.offer()
    house.home.close()
    eventually(lambda: len(house.backed.server.clients) == 1)
    assert house.usage()[2] == 2
    house.peer.accept(offer)
    house.peer.free(offer)
    eventually(lambda: house.usage()[2] == 0)
    [pool] = house.backed.server.pools.pools.values()
    assert pool.pool_id == house.pool.pool_id, "while somebody may pull from it"


@pytest.mark.parametrize("is_freed", [True, False], ids=["freed", "its connection ends"])
def test_a_peer_reads_what_it_has_found_until_it_gives_it_back_or_is_gone(house: House, is_freed: bool) -> None:
    digests = [bytes([number]) * DIGEST_BYTES for number in range(5)]
    block_ids = house.seal(digests[:3])
    house.peer.look_up("r", 0, digests[:2])
    found = house.hear()
    assert isinstance(found, PromptBlocks) and (found.request_id, found.attempt) == ("r", 0)
    assert unpack_ids(found.block_ids) == block_ids[:2] and num_cached(house.backed.server.pools) == 1
    house.peer.look_up("s", 0, digests[3:])
    nothing = house.hear()
    assert isinstance(nothing, PromptBlocks) and not nothing.block_ids
    if is_freed:
        house.peer.free(nothing)
        house.peer.free(found)
    else:
        house.peer.close()
    eventually(lambda: num_cached(house.backed.server.pools) == 3)
    assert not house.pool.problem


def test_claims_are_void_when_the_connection_ends_although_the_process_lives(house: House) -> None:
    claimed = house.offer()
    house.offer("s")
    house.peer.accept(claimed)
    eventually(lambda: house.num_claimed() == 2)
    eventually(lambda: house.told() == [KVReceived("r", 0)])
    house.peer.close()
    eventually(lambda: house.told() == [KVReceived("r", 0), KVDeclined("s", 0)])
    eventually(lambda: house.usage()[2:] == (0, 0) and house.num_claimed() == 0)
    assert len(house.backed.server.clients) == 1 and not house.backed.server.ended
    house.peer = house.visit()


@pytest.mark.medium
@pytest.mark.parametrize(
    "message",
    [
        BlocksWanted((1,)),
        PoolWanted(LAYOUT, (NUM_BLOCKS,)),
        WeightsWanted("m", "l", 10),
        BlocksFreed(pack_ids([1]), pack_ids([1])),
        KVAccepted("never offered", 0),
    ],
)
def test_a_peer_that_asks_for_what_is_not_a_peer_s_is_let_go(house: House, message: MemoryMessage) -> None:
    house.peer.connection.send(message)
    eventually(house.is_let_go)
    assert not house.pool.receive() and not house.pool.problem


def test_a_peer_of_a_pool_that_is_not_here_is_told_so(house: House) -> None:
    stranger = PeerPoolClient(house.backed.path, ("decode-1", 1), house.pool.pool_id + 1, LAYOUT)

    def is_told() -> bool:
        stranger.poll()
        return bool(stranger.problem)

    eventually(is_told)
    assert "there is no pool" in stranger.problem
    stranger.close()
    with pytest.raises(MemoryLost, match="No such file"):
        PeerPoolClient(house.backed.path.with_name("nobody.sock"), ("decode-1", 1), 1, LAYOUT)


def test_a_peer_that_hangs_loses_its_claims_when_others_wait_and_hears_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.peer.connection.send(MemoryKnock())
    claimed, waits = house.offer(), house.offer("s")
    assert waits.request_id == "s"
    house.peer.accept(claimed)
    eventually(lambda: house.num_claimed() == 2)
    monkeypatch.setattr(server_module, "HUNG_S", 0.05)
    neighbour = house.backed.connect("prefill-1")
    neighbour.claim_pool(LAYOUT, (NUM_BLOCKS,))
    neighbour.send(BlocksWanted((house.usage()[1] + 1,)))
    eventually(lambda: bool(neighbour.receive(BlocksLeased)))
    assert house.is_let_go(), "so what it pulled meanwhile does not count"


def test_a_server_that_is_gone_is_noticed_however_much_it_had_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than is read at once: a pull that is over by then does not count."""
    monkeypatch.setattr(channel_module, "READ_AT_ONCE_BYTES", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "memory.sock"))
        listener.listen()
        peer = PeerPoolClient(tmp_path / "memory.sock", ("decode-0", 1), 1, LAYOUT)
        server = Channel(listener.accept()[0])
        ids = pack_ids([1] * 10_000)
        while not server.unsent:
            server.send(KVOffer("decode-0", 1, "r", 0, 7, ids, ids, bytes(1250), b"", b""))
        peer.poll()
        assert not peer.problem
        server.close()
        peer.poll()
        assert "closed the connection" in peer.problem
        peer.close()


def test_a_server_that_is_gone_or_hangs_is_noticed(house: House) -> None:
    now_s = time.monotonic()
    hanging = PeerPoolClient(house.backed.path, ("decode-1", 1), house.pool.pool_id, LAYOUT, clock=lambda: now_s)
    eventually(lambda: len(house.backed.server.clients) == 3)
    house.backed.stop_turning()
    for _ in range(MAX_UNANSWERED + 1):
        assert not hanging.problem
        hanging.poll()
        now_s += 2 * ASK_S
        hanging.keep_alive()
    assert "not a word for" in hanging.problem
    hanging.close()
    house.backed.stop()
    eventually(house.is_let_go)
