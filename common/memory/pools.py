"""Pools of KV blocks: who uses one, who gets blocks of it, and what changes hands in it.

A worker asks for blocks ahead of need, so that no step waits for them; it gets what it asks for at once and whole, of
every group, or waits: so nobody waits for blocks of one group while it keeps others of another from him. Those that
decode come first, as what they have begun would be lost; prompts leave them a reserve to grow into. While somebody
waits all others are asked to give back what they hold in hand. Knows clients by number, and no sockets.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from common.errors import MemoryShort
from common.memory.backing import Memory
from common.memory.block_index import BlockIndex, OfferKey
from common.memory.exchange import Answer, Misbehaved
from common.memory.pattern import pattern
from common.wire.kv_layout import Counts, KVLayout
from common.wire.memory_messages import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    OfBlocks,
    PoolLeft,
    PoolRegion,
    PoolShortage,
    PrefixFound,
    PrefixWanted,
)
from common.wire.pool_shape import PoolShape, are_enough, minus, shown

MAX_BLOCK_BYTES = 128 * 1024 * 1024
NAN_BYTE = 0xFF
"""Makes NaN of every floating point type."""


@dataclass(frozen=True, slots=True)
class User:
    """A worker, as far as a pool cares."""

    client: int
    worker: tuple[str, int]  # id and epoch
    is_decoding: bool = False
    is_guest: bool = False  # it takes offers to pull them, and leases nothing


class Usage(NamedTuple):
    """What becomes of blocks, of whatever group; those that are left are leased, or read."""

    num_blocks: int
    num_free: int  # those that are cached included
    num_offered: int
    num_quarantined: int


@dataclass(slots=True, eq=False)
class Pool:
    """Memory, who has its blocks, and who wants some."""

    layout: KVLayout
    pool_id: int
    memory: Memory
    index: BlockIndex
    users: dict[int, User] = field(default_factory=dict)
    wants: dict[int, Counts] = field(default_factory=dict)  # by client, first come first
    passed: Counter[int] = field(default_factory=Counter)  # blocks that others got before one that waits for longer
    is_short: bool = False  # as users were told

    def in_order(self) -> list[int]:
        """Those that wait: who decodes, and wants least, before all others, first come first."""

        def place(client: int) -> tuple[bool, int]:
            is_decoding = self.users[client].is_decoding
            return not is_decoding, sum(self.wants[client]) if is_decoding else 0

        return sorted(self.wants, key=place)  # stable

    def may_pass(self, waiting: list[int], wanted: Counts) -> bool:
        """Whether prompts that wait for much may wait for that longer: for half as many blocks as they want, in all."""
        return not any(self.users[client].is_decoding for client in waiting) and all(
            self.passed[client] + sum(wanted) <= sum(self.wants[client]) // 2 for client in waiting
        )

    def forget(self, client: int) -> None:
        """It waits no more."""
        self.wants.pop(client, None)
        del self.passed[client]


class Pools:
    """All of one device; a client uses one at most.

    Args:
        allocate: memory of so many bytes; raises MemoryShort.
        reserve: share of a pool that prompts leave to what is being decoded.
        poisons: fill blocks that come free with NaN, so that whoever reads what it has not written notices.
    """

    def __init__(self, allocate: Callable[[int], Memory], reserve: float, *, poisons: bool) -> None:
        self.allocate, self.reserve, self.poisons = allocate, reserve, poisons
        self.pools: dict[KVLayout, Pool] = {}  # that who comes may use
        self.of_client: dict[int, Pool] = {}  # for those that are gone until they write no more

    def want(self, user: User, layout: KVLayout, num_blocks: Counts) -> list[Answer]:
        """Let a worker use the pool of that layout; raises MemoryShort when there is no room for it, then try again."""
        if user.client in self.of_client:
            raise Misbehaved("it has a pool already")
        if (block_bytes := max(group.block_bytes for group in layout.groups)) > MAX_BLOCK_BYTES:
            raise Misbehaved(f"blocks of {block_bytes} bytes, at most {MAX_BLOCK_BYTES}")
        if layout not in self.pools:
            self.pools[layout] = self._made(PoolShape(layout, num_blocks))
        pool = self.pools[layout]
        self.of_client[user.client] = pool
        pool.users[user.client] = user
        region = PoolRegion(pool.pool_id, pool.memory.handle, pool.index.shape.num_blocks)
        shortage = [Answer(user.client, PoolShortage(True))] if pool.is_short else []
        return [Answer(user.client, region, pool.memory.descriptor), *shortage]

    def visit(self, guest: User, pool_id: int) -> list[Answer]:
        """Let a guest read the pool of that id; nothing if there is none."""
        for pool in self.pools.values():
            if pool.pool_id == pool_id:
                self.of_client[guest.client] = pool
                pool.users[guest.client] = guest
                region = PoolRegion(pool.pool_id, pool.memory.handle, pool.index.shape.num_blocks)
                return [Answer(guest.client, region, pool.memory.descriptor)]
        return []

    def heed(self, client: int, message: OfBlocks) -> list[Answer]:
        """What a client says of blocks; raises Misbehaved."""
        match message:
            case BlocksWanted():
                return self.want_blocks(client, message.num_blocks)
            case BlocksSealed():
                return self.seal(client, message)
            case PrefixWanted():
                return self.match(client, message)
            case BlocksFreed():
                return self.freed(client, message)
            case KVOffer():
                return self.offered(client, message)
            case KVAccepted():
                return self.accepted(client, message)
            case KVDeclined():
                return self.declined(client, message)
            case PoolLeft():
                return self.left(client, message)

    def want_blocks(self, client: int, counts: Counts) -> list[Answer]:
        """Give blocks now or later; in place of what the client wanted before."""
        pool = self._pool_of(client)
        capacity = pool.index.shape.capacity
        if len(counts) != len(capacity) or not are_enough(capacity, counts):
            raise Misbehaved(f"{counts} blocks of a pool that has {capacity} to give")
        if not any(counts):
            pool.forget(client)
        else:
            pool.wants[client] = counts  # who waits already keeps its place
        return self._deal(pool)

    def seal(self, client: int, message: BlocksSealed) -> list[Answer]:
        """Let others find what a client has written."""
        self._pool_of(client).index.seal(client, *_blocks(message), message.keys)
        return []

    def match(self, client: int, message: PrefixWanted) -> list[Answer]:
        """Tell a client what it may read."""
        index = self._pool_of(client).index
        block_ids = index.sealed.match(client, message.keys)
        found = PrefixFound(message.request_id, message.attempt, *_packed(block_ids, index.generations(block_ids)))
        return [Answer(client, found)]

    def freed(self, client: int, message: BlocksFreed) -> list[Answer]:
        """Take blocks back, and give them to who waits."""
        pool = self._pool_of(client)
        pool.index.free(client, *_blocks(message))
        return self._deal(pool)

    def offered(self, client: int, message: KVOffer) -> list[Answer]:
        """Pass a prompt's blocks on to a decode worker; if there is none of that name they are free."""
        pool = self._pool_of(client)
        worker = message.decode_worker_id, message.decode_epoch
        takers = (user for user in pool.users.values() if user.is_decoding or user.is_guest)
        target = next((user.client for user in takers if user.worker == worker), None)
        if target is None:
            pool.index.free(client, *_blocks(message))
            return [Answer(client, KVDeclined(message.request_id, message.attempt)), *self._deal(pool)]
        key = OfferKey(target, message.request_id, message.attempt)
        pool.index.offer(client, key, *_blocks(message), message.num_sealed)
        return [Answer(target, message)]

    def accepted(self, client: int, message: KVAccepted) -> list[Answer]:
        """The offer is its own."""
        self._pool_of(client).index.accept(OfferKey(client, message.request_id, message.attempt))
        return []

    def declined(self, client: int, message: KVDeclined) -> list[Answer]:
        """The offer is nobody's."""
        pool = self._pool_of(client)
        pool.index.decline(OfferKey(client, message.request_id, message.attempt))
        return self._deal(pool)

    def left(self, client: int, message: PoolLeft) -> list[Answer]:
        """Take back what a client has or is about to hear of, but for what its device may still write."""
        pool = self._pool_of(client)
        pool.index.retain(client, *_blocks(message))
        del pool.users[client]
        pool.forget(client)
        return self._deal(pool)

    def leave(self, client: int) -> list[Answer]:
        """A client is gone, but may write on until `cure`, unless it was a guest, which only reads."""
        if client not in self.of_client:
            return []
        pool = self.of_client[client]
        user = pool.users.pop(client, None)
        pool.forget(client)
        pool.index.leave(client)
        return self.cure(client) if user is not None and user.is_guest else self._deal(pool)

    def cure(self, client: int) -> list[Answer]:
        """A client that is gone writes no more. A pool that nobody uses is given back with that."""
        if client not in self.of_client:
            return []
        pool = self.of_client.pop(client)
        pool.index.cure(client)
        if pool not in self.of_client.values():
            self._retire(pool)
            pool.memory.close()
            return []
        return self._deal(pool)

    def taint(self, client: int) -> set[int]:
        """Whoever comes gets another pool than what a client uses; returns all who use that."""
        if client not in self.of_client:
            return set()
        self._retire(self.of_client[client])
        return set(self.of_client[client].users)

    def num_quarantined(self, client: int) -> int:
        """Blocks that a client had when it left, as long as it may still write them."""
        return self.of_client[client].index.num_quarantined[client] if client in self.of_client else 0

    def holds_up_others(self, client: int) -> bool:
        """Whether others wait for blocks, and it has some, or has not said whether it takes them."""
        if client not in self.of_client:
            return False
        pool = self.of_client[client]
        has_offers = any(key.client == client for key in pool.index.offers)
        return bool(pool.wants.keys() - {client}) and (pool.index.holds(client) or has_offers)

    def usage(self) -> Usage:
        """Of all pools together."""
        indexes = [pool.index for pool in set(self.of_client.values())]
        return Usage(
            num_blocks=sum(sum(index.shape.capacity) for index in indexes),
            num_free=sum(sum(index.num_free) for index in indexes),
            num_offered=sum(index.num_offered for index in indexes),
            num_quarantined=sum(index.num_quarantined.total() for index in indexes),
        )

    @property
    def num_cached(self) -> int:
        """Of what is free, blocks of texts that are over, for others that begin alike."""
        return sum(len(pool.index.sealed.cached) for pool in set(self.of_client.values()))

    def close(self) -> None:
        for pool in set(self.of_client.values()):
            pool.memory.close()

    def _pool_of(self, client: int) -> Pool:
        pool = self.of_client.get(client)
        if pool is None or client not in pool.users:
            raise Misbehaved("it has no pool, or has left it")
        return pool

    def _retire(self, pool: Pool) -> None:
        if self.pools.get(pool.layout) is pool:
            del self.pools[pool.layout]

    def _made(self, shape: PoolShape) -> Pool:
        memory, pool_id = self.allocate(shape.num_bytes), secrets.randbits(63)

        def poison(block_ids: Iterable[int]) -> None:
            for block_id in block_ids:
                memory.fill(*shape.place(block_id), NAN_BYTE)

        index = BlockIndex(shape, poison if self.poisons else None)
        try:
            for block_id in shape.proof_ids:
                offset, size = shape.place(block_id)
                memory.write(offset, pattern(pool_id, block_id, size))
            if self.poisons:
                poison(chain.from_iterable(index.free_ids))
        except OSError as error:
            memory.close()
            counts = shown(shape.num_blocks)
            raise MemoryShort(f"a pool of {counts} blocks, {shape.num_bytes} bytes: {error.strerror}") from None
        return Pool(shape.layout, pool_id, memory, index)

    def _deal(self, pool: Pool) -> list[Answer]:
        """Give blocks to those that wait, in order; who wants little may pass who wants much, for a while."""
        answers, available = [], pool.index.num_free
        waiting: list[int] = []
        for client in pool.in_order():
            wanted, reserve = pool.wants[client], self._reserve_before(pool, client)
            is_next = are_enough(minus(available, reserve), wanted)
            if is_next or (pool.may_pass(waiting, wanted) and are_enough(minus(pool.index.num_free, reserve), wanted)):
                pool.passed.update(dict.fromkeys(waiting, sum(wanted)))
                pool.forget(client)
                block_ids = pool.index.lease(client, wanted)
                leased = BlocksLeased(*_packed(block_ids, pool.index.generations(block_ids)))
                answers.append(Answer(client, leased))
            else:
                waiting.append(client)
            available = minus(available, wanted)
        if pool.is_short != bool(pool.wants):
            pool.is_short = bool(pool.wants)
            users = [user.client for user in pool.users.values() if not user.is_guest]
            answers += [Answer(client, PoolShortage(pool.is_short)) for client in users]
        return answers

    def _reserve_before(self, pool: Pool, client: int) -> Counts:
        """Blocks that it leaves to what is being decoded."""
        index = pool.index
        decoding = [user.client for user in pool.users.values() if user.is_decoding]
        is_decoding = bool(index.offers) or any(index.holds(client) for client in decoding)
        if client in decoding or not is_decoding:
            return index.shape.layout.nothing
        return tuple(int(self.reserve * count) for count in index.shape.num_blocks)


def _blocks(message: BlocksSealed | BlocksFreed | PoolLeft | KVOffer) -> tuple[np.ndarray, np.ndarray]:
    """What is named there, as the index has it: ids, [num_blocks] intp, and generations, [num_blocks] int32."""
    return np.frombuffer(message.block_ids, np.int32).astype(np.intp), np.frombuffer(message.generations, np.int32)


def _packed(block_ids: np.ndarray, generations: np.ndarray) -> tuple[bytes, bytes]:
    """The same as it travels."""
    return block_ids.astype(np.int32).tobytes(), generations.tobytes()
