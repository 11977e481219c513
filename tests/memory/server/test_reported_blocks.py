"""A real memory server tells whoever is in the router's place which blocks it has; see `test_announcer`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.memory.client.lease_cache import LeaseCache
from common.memory.server.report import num_cached
from common.wire.messages.memory import BlocksLeased, MemoryTainted, PoolShortage
from common.wire.messages.memory_reports import BlockEvent, KVEvents, MemoryHeartbeat
from common.wire.messages.worker import Knock, KVEventsWanted, Refused, Reregister
from common.wire.values.block_key import short_keys, unpack_short_keys
from common.wire.values.fields import DIGEST_BYTES
from common.wire.values.packing import unpack_ids
from tests.memory.server.test_announcer import SERVER, Rig
from tests.support.layouts import one_group

LAYOUT = one_group("model", 1, 1, 1, 1, "float16")
NUM_BLOCKS = 200
TEXTS = [[bytes([text, number]).ljust(DIGEST_BYTES, b".") for number in range(20)] for text in range(16)]
"""Digests of the blocks of some texts."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


class Writer:
    """A worker that seals blocks of texts, and reads them no more."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.client = rig, rig.connect("prefill-0")
        claim = self.client.claim_pool(LAYOUT, (NUM_BLOCKS,))
        os.close(claim.descriptor or 0)
        self.pool_id, self.leases = claim.pool_id, LeaseCache(claim.shape, self.client.send)

    def write(self, digests: list[bytes]) -> None:
        num_blocks = (len(digests),)
        while not self.leases.fetch(num_blocks):
            self.leases.update(num_blocks, num_blocks)
            self.rig.until(self._hear)
        [block_ids] = self.leases.allocate(num_blocks)
        self.leases.seal(block_ids, digests)
        self.leases.free(block_ids)
        self.leases.update((0,), (0,))

    def _hear(self) -> bool:
        for message in self.client.receive(BlocksLeased, PoolShortage):
            if isinstance(message, BlocksLeased):
                self.leases.receive(message)
                return True
        return False


class Listener:
    """In the router's place: what is there, as far as it was told."""

    def __init__(self, rig: Rig, pool_id: int) -> None:
        self.rig, self.pool_id = rig, pool_id

    def ask(self) -> None:
        hub = self.rig.hub
        assert hub is not None
        self.rig.until(lambda: hub.send(SERVER, KVEventsWanted(self.pool_id)))

    def events(self) -> list[KVEvents]:
        """Since it was last told from the beginning."""
        told = [message for message in self.rig.got(KVEvents) if message.pool_id == self.pool_id]
        begins = [number for number, message in enumerate(told) if message.sequence == 0]
        return told[begins[-1] :] if begins else []

    def there(self) -> set[int]:
        there: set[int] = set()
        for number, message in enumerate(self.events()):
            if message.sequence != number:
                return set()  # a number is missing: nothing is known until it is asked again
            keys = unpack_short_keys(message.keys).tolist()
            for kind, length in zip(message.kinds, unpack_ids(message.runs), strict=True):
                there = there | set(keys[:length]) if kind == BlockEvent.SEALED else there - set(keys[:length])
                keys = keys[length:]
        return there


def keys_of(*texts: list[bytes]) -> set[int]:
    return {key for text in texts for key in short_keys(text)}


def test_who_asks_hears_of_all_blocks_and_of_what_becomes_of_them(rig: Rig) -> None:
    rig.open_router()
    writer = Writer(rig)
    listener = Listener(rig, writer.pool_id)
    writer.write(TEXTS[0])
    rig.rest()
    assert not rig.got(KVEvents), "nobody has asked"
    listener.ask()
    rig.until(lambda: listener.there() == keys_of(TEXTS[0]))
    for text in TEXTS[1:4]:
        writer.write(text)
    rig.until(lambda: listener.there() == keys_of(*TEXTS[:4]))
    for text in TEXTS[4:]:  # 320 blocks in all do not fit
        writer.write(text)
    rig.until(lambda: keys_of(*TEXTS[-3:]) < listener.there())
    rig.rest()
    found = rig.server.pools.pools[LAYOUT].index.sealed.block_of
    assert listener.there() == set(unpack_short_keys(b"".join(key[:8] for key in found))) and len(found) < NUM_BLOCKS
    num_told = len(listener.events())
    rig.rest()
    assert len(listener.events()) > num_told, "with each heartbeat it says how far it is"


def test_what_comes_in_a_row_is_told_together(rig: Rig) -> None:
    rig.open_router()
    writer = Writer(rig)
    listener = Listener(rig, writer.pool_id)
    listener.ask()
    rig.until(listener.events)
    rig.rest()
    writer.write(TEXTS[0])
    rig.until(lambda: listener.there() == keys_of(TEXTS[0]))
    assert max(len(message.keys) for message in listener.events()) == 20 * 8


@pytest.mark.medium
def test_a_pool_that_is_not_there_is_not_told_of_and_one_that_was_given_back_no_more(rig: Rig) -> None:
    rig.open_router()
    nowhere = Listener(rig, 12345)
    nowhere.ask()
    writer = Writer(rig)
    listener = Listener(rig, writer.pool_id)
    listener.ask()
    rig.until(listener.events)
    writer.client.close()
    rig.until(lambda: not rig.announcer.logs)
    num_told = len(rig.got(KVEvents))
    rig.rest()
    assert len(rig.got(KVEvents)) == num_told and not nowhere.events()


def test_a_new_router_has_to_ask(rig: Rig) -> None:
    hub = rig.open_router()
    writer = Writer(rig)
    listener = Listener(rig, writer.pool_id)
    listener.ask()
    writer.write(TEXTS[0])
    rig.until(lambda: listener.there() == keys_of(TEXTS[0]))
    hub.send(SERVER, Reregister(2))
    rig.until(lambda: not rig.announcer.logs)
    writer.write(TEXTS[1])
    num_told = len(rig.got(KVEvents))
    rig.rest()
    assert len(rig.got(KVEvents)) == num_told
    listener.ask()
    rig.until(lambda: listener.there() == keys_of(*TEXTS[:2]))
    hub.send(SERVER, Refused("another has its id"))
    rig.until(lambda: not rig.announcer.logs)


def test_while_nothing_is_heard_of_the_router_nothing_piles_up(rig: Rig) -> None:
    hub = rig.open_router()
    writer = Writer(rig)
    listener = Listener(rig, writer.pool_id)
    listener.ask()
    rig.until(listener.events)
    for _ in range(20):
        hub.send(SERVER, Knock(1))
        rig.rest()
    assert rig.announcer.logs
    rig.announcer.received_s -= 2 * rig.announcer.timeout_s
    rig.until(lambda: not rig.announcer.logs)
    writer.write(TEXTS[0])
    rig.until(lambda: num_cached(rig.server.pools) == 20)
    assert not rig.server.pools.pools[LAYOUT].index.sealed.log.has_news
    assert rig.got(MemoryHeartbeat), "it says that it lives all the same"


def test_a_damaged_pool_has_nothing(rig: Rig) -> None:
    rig.open_router()
    writer = Writer(rig)
    listener = Listener(rig, writer.pool_id)
    listener.ask()
    writer.write(TEXTS[0])
    rig.until(lambda: listener.there() == keys_of(TEXTS[0]))
    writer.client.send(MemoryTainted("a fault"))
    rig.until(lambda: listener.events() and not listener.there())
