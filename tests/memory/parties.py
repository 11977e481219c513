"""Who takes part in a pool, as a model: workers and peers, what they believe, and what is on its way to them."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from msgspec.structs import replace

from common.memory.blocks.index import BlockIndex
from common.memory.blocks.lease_table import BlockState, Holding
from common.memory.blocks.pool import Pool, User
from common.memory.blocks.sealed import SealedBlocks
from common.memory.client.lease_cache import Grant, LeaseCache
from common.memory.devices.backing import Memory
from common.memory.server.pools import NAN_BYTE, Pools
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    MemoryMessage,
    PoolLeft,
    PoolRegion,
    PoolShortage,
    PromptBlocks,
    PromptWanted,
)
from common.wire.values.block_key import pack_keys
from common.wire.values.fields import DIGEST_BYTES
from common.wire.values.flags import pack_flags, unpack_flags
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from tests.memory.tiers import slow_tier
from tests.support.allocator import blocks_read
from tests.support.messages import first_sealed


class Bytes:
    """Memory that can be looked at."""

    handle, address, descriptor = b"handle", 0, None

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.content, self.is_closed = num_bytes, bytearray(num_bytes), False

    def write(self, offset: int, data: bytes | bytearray) -> None:
        assert not self.is_closed and offset + len(data) <= self.num_bytes
        self.content[offset : offset + len(data)] = data

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        self.write(offset, bytes([byte]) * num_bytes)

    def seal(self) -> None:
        raise AssertionError("a pool is written for ever")

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


BLOCK_US = 2000
NUM_SLOTS = 6
MOST_SEALED = 4
"""Blocks of a text that may be found."""


def offer_of(
    worker_id: str, request_id: str, block_ids: list[int], generations: list[int], num_sealed: int = 0
) -> KVOffer:
    ids = pack_ids(block_ids), pack_ids(generations)
    return KVOffer(worker_id, 1, request_id, 0, 7, *ids, first_sealed(num_sealed, len(block_ids)), b"", b"")


def sealed_of(offer: KVOffer) -> set[int]:
    """Blocks that are sealed, as the offer says."""
    block_ids = unpack_ids(offer.block_ids)
    are_sealed = unpack_flags(offer.are_sealed, len(block_ids)).tolist()
    return {block_id for block_id, is_sealed in zip(block_ids, are_sealed, strict=True) if is_sealed}


def blocks_in(offered: Holding) -> Counter[int]:
    """How often it names each, as the server has it."""
    leased, (sealed, times, _) = offered
    return Counter([*leased.tolist(), *np.repeat(sealed, times).tolist()])


def digest_of(byte: int, number: int) -> bytes:
    """Of the block of that number of texts of that byte."""
    return bytes([byte % 256, byte // 256, number]).ljust(DIGEST_BYTES, b".")


@dataclass(eq=False)
class Text:
    """A sequence: all its blocks hold its byte once it was written."""

    byte: int
    block_ids: list[int]
    is_written: bool = False
    sealed: set[int] = field(default_factory=set)  # blocks that are written no more
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and place, where it grows
    num_places: int = 0  # found or sealed

    @property
    def own(self) -> list[int]:
        """Blocks that may be written."""
        return [block_id for block_id in self.block_ids if block_id not in self.sealed]


def leases_of(leases: LeaseCache) -> dict[int, int]:
    """The generation of each leased block."""
    generation = leases._generation
    block_ids = np.flatnonzero(generation)
    return dict(zip(block_ids.tolist(), generation[block_ids].tolist(), strict=True))


def references_of(sealed: SealedBlocks, client: int) -> dict[int, int]:
    """How often a client reads each block, as the server has it."""
    readings = sealed.readers.of_client.get(client, np.zeros(0, np.int64))
    return {block_id: int(readings[block_id]) for block_id in np.flatnonzero(readings).tolist()}


class House:
    """A memory server with one pool, and what was offered there."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape, self.memory = shape, Bytes(0)
        self.tier, self.copies = slow_tier(shape.layout.groups[0].block_bytes, NUM_SLOTS)
        self.pools = Pools(self._allocate, 0.2, poisons=True, tier=self.tier)
        self.offers: dict[str, KVOffer] = {}  # by request
        self.bytes_offered: dict[str, int] = {}
        self.received: set[str] = set()  # requests of which the server was told that they are

    def _allocate(self, num_bytes: int) -> Memory:
        self.memory = Bytes(num_bytes)
        return self.memory

    @property
    def pool(self) -> Pool:
        return self.pools.pools[self.shape.layout]

    @property
    def index(self) -> BlockIndex:
        return self.pool.index

    @property
    def pool_id(self) -> int:
        return self.pools.pools[self.shape.layout].pool_id

    def block(self, block_id: int) -> bytes:
        at, size = self.shape.place(block_id)
        return bytes(self.memory.content[at : at + size])

    def holds(self, block_id: int, byte: int) -> bool:
        """Whether all of a block is that byte."""
        return self.block(block_id) == bytes([byte]) * self.shape.place(block_id).num_bytes

    def write(self, block_id: int, byte: int) -> None:
        """As who maps it does, whatever became of the server."""
        at, size = self.shape.place(block_id)
        self.memory.content[at : at + size] = bytes([byte]) * size


@dataclass
class Held:
    """Blocks of one party."""

    leased: set[int]
    read: Counter[int]
    offered: Counter[int]

    def not_heard(self, message: MemoryMessage) -> None:
        """It does not know this yet."""
        match message:
            case BlocksLeased():
                self.leased -= set(unpack_ids(message.block_ids))
            case PromptBlocks():
                block_ids = unpack_ids(message.block_ids)
                self.read -= Counter(block_ids[: message.num_sealed])
                self.leased -= set(block_ids[message.num_sealed :])
            case KVOffer():
                self.offered -= Counter(unpack_ids(message.block_ids))

    def not_read(self, message: MemoryMessage, offers: dict[str, KVOffer]) -> None:
        """The server does not know this yet."""
        match message:
            case KVAccepted() | KVDeclined():
                offer = offers[message.request_id]
                block_ids = unpack_ids(offer.block_ids)
                self.offered -= Counter(block_ids)
                if isinstance(message, KVAccepted):
                    sealed = sealed_of(offer)
                    self.leased |= set(block_ids) - sealed
                    self.read += Counter(sealed)
            case BlocksSealed():
                self.leased -= set(unpack_ids(message.block_ids))
                self.read += Counter(unpack_ids(message.block_ids))
            case BlocksFreed() | KVOffer():
                block_ids = unpack_ids(message.block_ids)
                self.read -= Counter(block_id for block_id in block_ids if block_id not in self.leased)
                self.leased -= set(block_ids)


@dataclass(eq=False)
class Party:
    """One incarnation; messages in both directions take their time."""

    client: int
    house: House
    said: deque[MemoryMessage] = field(default_factory=deque)
    heard: deque[MemoryMessage] = field(default_factory=deque)
    offered: list[KVOffer] = field(default_factory=list)
    owned: set[str] = field(default_factory=set)  # requests offered to others, and those that it has received
    is_connected: bool = True  # it may not have noticed that it is not

    @property
    def user(self) -> User:
        raise NotImplementedError

    def accept(self, offer: KVOffer) -> None:
        raise NotImplementedError

    def hear(self) -> None:
        raise NotImplementedError

    def receive(self, offer: KVOffer) -> None:
        """Own the request, and decide about the blocks later."""
        if offer.request_id not in self.owned:
            self.owned.add(offer.request_id)
            self.said.append(KVReceived(offer.request_id, offer.attempt))

    def decline(self, offer: KVOffer) -> None:
        self.owned.discard(offer.request_id)
        self.said.append(KVDeclined(offer.request_id, offer.attempt))

    @property
    def has_offers(self) -> bool:
        """Here, or on their way here."""
        return bool(self.offered) or any(isinstance(message, KVOffer) for message in self.heard)

    def let_everything_go(self) -> None:
        while self.offered:
            self.decline(self.offered.pop())

    def blocks(self, state: BlockState) -> set[int]:
        """As the server has it."""
        leases = self.house.index.leases
        return {*leases.in_state(state).tolist()} & {*leases.claimed_by(self.client).tolist()}

    def expected(self) -> tuple[set[int], Counter[int], Counter[int]]:
        """What it should believe to have, to read and to be offered: as the server has it, and what is on its way."""
        offers = self.house.index.offers.items()
        held = Held(
            self.blocks(BlockState.LEASED),
            Counter(references_of(self.house.index.sealed, self.client)),
            sum((blocks_in(of_text) for key, of_text in offers if key.client == self.client), Counter[int]()),
        )
        for message in self.heard:
            held.not_heard(message)
        for message in self.said:
            held.not_read(message, self.house.offers)
        return held.leased, held.read, held.offered


@dataclass(eq=False)
class Worker(Party):
    """Its process may outlive its connection, and its device writes for as long as that."""

    is_decoding: bool = False
    texts: list[Text] = field(default_factory=list)
    has_left: bool = False  # in order, or killed: it does nothing more, but for its device
    is_over: bool = False
    now_s: float = 0.0
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.leases = LeaseCache(self.house.shape, self.said.append, clock=lambda: self.now_s)

    @property
    def user(self) -> User:
        return User(self.client, (f"c{self.client}", 1), self.is_decoding)

    @property
    def writable(self) -> set[int]:
        """Blocks that this worker or its device may write."""
        if self.has_left:
            return {block_id for text in self.texts for block_id in text.own}
        return set(leases_of(self.leases))

    @property
    def readable(self) -> Counter[int]:
        """Blocks that it reads, as the server will have it when it has heard everything."""
        return Counter(blocks_read(self.leases)) + Counter(self.leases.unread)

    @property
    def may_end(self) -> bool:
        """Whether nothing but its process is left of it."""
        return not (self.is_connected or self.is_over)

    def hear(self) -> None:
        match self.heard.popleft():
            case BlocksLeased() as leased:
                self.leases.receive(leased)
                for block_id in unpack_ids(leased.block_ids):
                    assert self.house.holds(block_id, NAN_BYTE), "somebody wrote what is free"
            case PoolShortage(is_short):
                self.leases.demand.shortage(is_short=is_short)
            case KVOffer() as offer:
                self.offered.append(offer)
            case PromptBlocks() as granted:
                self._begin_with(int(granted.request_id), self.leases.granted(granted))
            case KVReceived() | KVDeclined() as answer:
                self.owned.remove(answer.request_id)
                assert isinstance(answer, KVReceived) == (answer.request_id in self.house.received)
            case PoolRegion():
                pass
            case other:
                raise AssertionError(other)

    def look_for(self, byte: int, first: int = 0) -> None:
        """Begin another text of that byte with what is there of one, from its block of that number on."""
        digests = [digest_of(byte, number) for number in range(first, MOST_SEALED)]
        self.num_asked += 1
        counts = tuple(len(digests) + 1 if group.grows else 1 for group in self.house.shape.layout.groups)
        self.said.append(PromptWanted(str(byte), self.num_asked, pack_keys(digests), BLOCK_US, counts, 0))

    def _begin_with(self, byte: int, grant: Grant) -> None:
        """As far as it is found, it has what its next token needs."""
        layout, num_places, found = self.house.shape.layout, grant.num_places, set(chain.from_iterable(grant.found))
        assert all(self.house.holds(block_id, byte) for block_id in found), "somebody wrote what is sealed"
        fresh = chain.from_iterable(grant.fresh)
        assert all(self.house.holds(block_id, NAN_BYTE) for block_id in fresh), "somebody wrote what is free"
        places = dict[tuple[int, int], int]()
        for number, (group, here, more) in enumerate(zip(layout.groups, grant.found, grant.fresh, strict=True)):
            first_seen = group.first_seen(num_places * group.block_size + 1) if group.grows else num_places - 1
            assert len(here) == max(0, num_places - max(0, first_seen)), "what the next token sees"
            begin = num_places - len(here) if group.window else 0
            if group.grows:
                places |= {(number, begin + at): block_id for at, block_id in enumerate([*here, *more])}
        self.texts.append(Text(byte, grant.block_ids, sealed=found, places=places, num_places=num_places))

    def seal(self, count: int) -> list[int]:
        """So many blocks more of each text that is written; the bytes of those."""
        bytes_of_texts, layout = [], self.house.shape.layout
        for text in self.texts:
            block_ids, digests = list[int](), list[bytes]()
            while text.is_written and count > len(set(digests)) and text.num_places < MOST_SEALED:
                growing = [number for number, group in enumerate(layout.groups) if group.grows]
                at_place = [text.places.get((number, text.num_places)) for number in growing]
                new = [block_id for block_id in at_place if block_id is not None and block_id not in text.sealed]
                if not new:
                    break
                block_ids += new
                digests += [digest_of(text.byte, text.num_places)] * len(new)
                text.num_places += 1
            if block_ids:
                snapshots = [i for i in text.own if self.house.shape.group_of(i) in layout.states][:1]
                self.leases.seal([*block_ids, *snapshots], [*digests, *digests[-1:] * len(snapshots)])
                text.sealed |= {*block_ids, *snapshots}
                bytes_of_texts.append(text.byte)
        return bytes_of_texts

    def begin(self, byte: int, counts: Counts) -> None:
        blocks, groups = self.leases.allocate(counts), self.house.shape.layout.groups
        places = {(n, at): i for n, ids in enumerate(blocks) if groups[n].grows for at, i in enumerate(ids)}
        self.texts.append(Text(byte, list(chain.from_iterable(blocks)), places=places))

    def write(self) -> None:
        for text in self.texts:
            text.is_written = True
            for block_id in text.own:
                self.house.write(block_id, text.byte)

    def end(self) -> None:
        self.leases.free(self.texts.pop(0).block_ids)

    def hand_over(self, worker_id: str) -> None:
        self.write()
        text = self.texts.pop()
        request_id = f"r{len(self.house.offers)}"
        generations = self.leases.release(text.block_ids).tolist()
        flags = pack_flags(np.array([block_id in text.sealed for block_id in text.block_ids]))
        offer = replace(offer_of(worker_id, request_id, text.block_ids, generations), are_sealed=flags)
        self.house.offers[request_id], self.house.bytes_offered[request_id] = offer, text.byte
        self.owned.add(request_id)
        self.said.append(offer)

    def accept(self, offer: KVOffer) -> None:
        block_ids, byte = unpack_ids(offer.block_ids), self.house.bytes_offered[offer.request_id]
        assert all(self.house.holds(block_id, byte) for block_id in block_ids), "somebody wrote what was offered"
        are_sealed = unpack_flags(offer.are_sealed, len(block_ids))
        self.leases.adopt(block_ids, unpack_ids(offer.generations), are_sealed)
        self.owned.discard(offer.request_id)
        self.said.append(KVAccepted(offer.request_id, offer.attempt))
        self.texts.append(Text(byte, block_ids, is_written=True, sealed=sealed_of(offer)))

    def let_everything_go(self) -> None:
        while self.texts:
            self.end()
        super().let_everything_go()

    def part(self) -> None:
        """Say what the device may still write, and that all else is free; do nothing more."""
        self.has_left = True
        block_ids = self.leases.in_use
        self.said.append(PoolLeft(pack_ids(block_ids), self.leases.generations(block_ids).tobytes()))
        for text in self.texts:  # what is sealed of them may be another's as soon as that is heard
            text.block_ids, text.sealed = text.own, set()


@dataclass(eq=False)
class Pull:
    """Blocks on their way to a peer's own pool, of a text of that byte."""

    said: KVOffer | PromptBlocks
    byte: int
    copied: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Peer(Party):
    """It reads what was offered to it and it has claimed, what it has looked for, and what is complete of prompts."""

    pulls: list[Pull] = field(default_factory=list)
    ahead: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # by prompt, block and generation

    @property
    def user(self) -> User:
        return User(self.client, (f"c{self.client}", 1), is_peer=True)

    @property
    def readable(self) -> set[int]:
        """Blocks that it may read, as it was not told otherwise."""
        return {block_id for pull in self.pulls for block_id in unpack_ids(pull.said.block_ids)}

    def hear(self) -> None:
        match self.heard.popleft():
            case KVOffer() as offer:
                self.offered.append(offer)
            case PromptBlocks() as found if found.block_ids:
                self.pulls.append(Pull(found, int(found.request_id)))
            case PoolRegion() | PromptBlocks():
                pass
            case other:
                raise AssertionError(other)

    def look_for(self, byte: int) -> None:
        """What is there of a text of that byte."""
        keys = pack_keys([digest_of(byte, number) for number in range(MOST_SEALED)])
        self.said.append(PromptWanted(str(byte), 0, keys, 0, self.house.shape.layout.nothing, 0))

    def accept(self, offer: KVOffer) -> None:
        self.owned.discard(offer.request_id)
        self.said.append(KVAccepted(offer.request_id, offer.attempt))
        self.pulls.append(Pull(offer, self.house.bytes_offered[offer.request_id]))

    def copy(self, count: int) -> None:
        """Some blocks of each text that is being pulled: those that were not pulled ahead of its offer."""
        for pull in list(self.pulls):
            block_ids, generations = unpack_ids(pull.said.block_ids), unpack_ids(pull.said.generations)
            rest = slice(len(pull.copied), None)
            for block_id, generation in list(zip(block_ids, generations, strict=True))[rest][:count]:
                pull.copied.append(self.ahead.get((pull.byte, block_id, generation)) or self.house.block(block_id))
            if len(pull.copied) == len(block_ids):
                self._finish(pull)

    def pull_ahead(self, worker: Worker) -> None:
        """What a worker has computed so far of what it may offer."""
        for text in worker.texts:
            if text.is_written:
                generations = worker.leases.generations(text.block_ids).tolist()
                for block_id, generation in zip(text.block_ids, generations, strict=True):
                    self.ahead[text.byte, block_id, generation] = self.house.block(block_id)

    def _finish(self, pull: Pull) -> None:
        """Give back what has arrived; it counts if the connection stands, and then it is what was offered or found."""
        self.pulls.remove(pull)
        self.said.append(BlocksFreed(pull.said.block_ids, pull.said.generations))
        if self.is_connected:
            sizes = [self.house.shape.place(block_id).num_bytes for block_id in unpack_ids(pull.said.block_ids)]
            assert pull.copied == [bytes([pull.byte]) * size for size in sizes], "it read another's"

    def let_everything_go(self) -> None:
        self.said += [BlocksFreed(pull.said.block_ids, pull.said.generations) for pull in self.pulls]
        self.pulls.clear()
        super().let_everything_go()
