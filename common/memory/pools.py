"""Pools of KV blocks: who uses one, who gets blocks of it, and what changes hands in it.

A worker asks for blocks ahead of need, so that no step waits for them; it gets what it asks for at once and whole, or
waits. Those that decode come first, as what they have begun would be lost; prompts leave them a reserve to grow into.
While somebody waits all others are asked to give back what they hold in hand. Knows clients by number, and no sockets.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import MemoryShort
from common.memory.backing import Memory
from common.memory.block_index import BlockIndex, OfferKey
from common.memory.exchange import Answer, Misbehaved
from common.memory.pattern import pattern
from common.wire.kv_layout import PROOF_BLOCK, KVLayout
from common.wire.memory_messages import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    PoolRegion,
    PoolShortage,
)
from common.wire.packing import pack_ids, unpack_ids

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
    """What becomes of blocks; those that are left are leased."""

    num_blocks: int
    num_free: int
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
    wants: dict[int, int] = field(default_factory=dict)  # blocks by client, first come first
    is_short: bool = False  # as users were told


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

    def want(self, user: User, layout: KVLayout, num_blocks: int) -> list[Answer]:
        """Let a worker use the pool of that layout; raises MemoryShort when there is no room for it, then try again."""
        if user.client in self.of_client:
            raise Misbehaved("it has a pool already")
        if layout.block_bytes > MAX_BLOCK_BYTES:
            raise Misbehaved(f"blocks of {layout.block_bytes} bytes, at most {MAX_BLOCK_BYTES}")
        if layout not in self.pools:
            self.pools[layout] = self._made(layout, num_blocks)
        pool = self.pools[layout]
        self.of_client[user.client] = pool
        pool.users[user.client] = user
        region = PoolRegion(pool.pool_id, pool.memory.handle, pool.index.num_blocks)
        shortage = [Answer(user.client, PoolShortage(True))] if pool.is_short else []
        return [Answer(user.client, region, pool.memory.descriptor), *shortage]

    def visit(self, guest: User, pool_id: int) -> list[Answer]:
        """Let a guest read the pool of that id; nothing if there is none."""
        for pool in self.pools.values():
            if pool.pool_id == pool_id:
                self.of_client[guest.client] = pool
                pool.users[guest.client] = guest
                region = PoolRegion(pool.pool_id, pool.memory.handle, pool.index.num_blocks)
                return [Answer(guest.client, region, pool.memory.descriptor)]
        return []

    def heed(
        self, client: int, message: BlocksWanted | BlocksFreed | KVOffer | KVAccepted | KVDeclined
    ) -> list[Answer]:
        """What a client says of blocks; raises Misbehaved."""
        match message:
            case BlocksWanted():
                return self.want_blocks(client, message.num_blocks)
            case BlocksFreed():
                return self.freed(client, message)
            case KVOffer():
                return self.offered(client, message)
            case KVAccepted():
                return self.accepted(client, message)
            case KVDeclined():
                return self.declined(client, message)

    def want_blocks(self, client: int, count: int) -> list[Answer]:
        """Give blocks now or later; in place of what the client wanted before."""
        pool = self._pool_of(client)
        if count >= pool.index.num_blocks:
            raise Misbehaved(f"{count} blocks of a pool of {pool.index.num_blocks}")
        if count == 0:
            pool.wants.pop(client, None)
        else:
            pool.wants[client] = count  # who waits already keeps its place
        return self._deal(pool)

    def freed(self, client: int, message: BlocksFreed) -> list[Answer]:
        """Take blocks back, and give them to who waits."""
        pool = self._pool_of(client)
        pool.index.free(client, unpack_ids(message.block_ids), unpack_ids(message.generations))
        return self._deal(pool)

    def offered(self, client: int, message: KVOffer) -> list[Answer]:
        """Pass a prompt's blocks on to a decode worker; if there is none of that name they are free."""
        pool = self._pool_of(client)
        worker = message.decode_worker_id, message.decode_epoch
        takers = (user for user in pool.users.values() if user.is_decoding or user.is_guest)
        target = next((user.client for user in takers if user.worker == worker), None)
        block_ids, generations = unpack_ids(message.block_ids), unpack_ids(message.generations)
        if target is None:
            pool.index.free(client, block_ids, generations)
            return [Answer(client, KVDeclined(message.request_id, message.attempt)), *self._deal(pool)]
        pool.index.offer(client, OfferKey(target, message.request_id, message.attempt), block_ids, generations)
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

    def leave(self, client: int) -> list[Answer]:
        """A client is gone, but may write on until `cure`, unless it was a guest."""
        if client not in self.of_client:
            return []
        pool = self._pool_of(client)
        user = pool.users.pop(client)
        pool.wants.pop(client, None)
        pool.index.leave(client)
        return self.cure(client) if user.is_guest else self._deal(pool)

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
        return self._pool_of(client).index.num_quarantined[client] if client in self.of_client else 0

    def holds_up_others(self, client: int) -> bool:
        """Whether others wait for blocks, and it has some, or as a guest has not said whether it takes them."""
        if client not in self.of_client:
            return False
        pool = self._pool_of(client)
        user = pool.users.get(client)
        has_offers = user is not None and user.is_guest and any(key.client == client for key in pool.index.offers)
        return bool(pool.wants.keys() - {client}) and (pool.index.num_leased[client] > 0 or has_offers)

    def usage(self) -> Usage:
        """Of all pools together."""
        indexes = [pool.index for pool in set(self.of_client.values())]
        return Usage(
            num_blocks=sum(index.num_blocks - 1 for index in indexes),
            num_free=sum(index.num_free for index in indexes),
            num_offered=sum(index.num_offered for index in indexes),
            num_quarantined=sum(index.num_quarantined.total() for index in indexes),
        )

    def close(self) -> None:
        for pool in set(self.of_client.values()):
            pool.memory.close()

    def _pool_of(self, client: int) -> Pool:
        if client not in self.of_client:
            raise Misbehaved("it has no pool")
        return self.of_client[client]

    def _retire(self, pool: Pool) -> None:
        if self.pools.get(pool.layout) is pool:
            del self.pools[pool.layout]

    def _made(self, layout: KVLayout, num_blocks: int) -> Pool:
        memory, pool_id, size = self.allocate(num_blocks * layout.block_bytes), secrets.randbits(63), layout.block_bytes
        try:
            memory.write(PROOF_BLOCK * size, pattern(pool_id, size))
        except OSError as error:
            memory.close()
            raise MemoryShort(f"a pool of {num_blocks} blocks of {size} bytes: {error.strerror}") from None

        def poison(block_ids: Sequence[int]) -> None:
            for block_id in block_ids:
                memory.fill(block_id * size, size, NAN_BYTE)

        index = BlockIndex(num_blocks, poison if self.poisons else None)
        if self.poisons:
            poison(index.free_ids)
        return Pool(layout, pool_id, memory, index)

    def _deal(self, pool: Pool) -> list[Answer]:
        """Give blocks to those that wait; nobody passes one that waits for more."""
        answers = []
        for client in sorted(pool.wants, key=lambda client: not pool.users[client].is_decoding):  # stable
            if not self._may_have(pool, client, pool.wants[client]):
                break
            block_ids = pool.index.lease(client, pool.wants.pop(client))
            generations = pool.index.generations(block_ids)
            answers.append(Answer(client, BlocksLeased(pack_ids(block_ids), pack_ids(generations))))
        if pool.is_short != bool(pool.wants):
            pool.is_short = bool(pool.wants)
            users = [user.client for user in pool.users.values() if not user.is_guest]
            answers += [Answer(client, PoolShortage(pool.is_short)) for client in users]
        return answers

    def _may_have(self, pool: Pool, client: int, count: int) -> bool:
        index, num_left = pool.index, pool.index.num_free - count
        if pool.users[client].is_decoding:
            return num_left >= 0
        decoding = [user.client for user in pool.users.values() if user.is_decoding]
        is_decoding = bool(index.offers) or any(index.num_leased[client] for client in decoding)
        return num_left >= (int(self.reserve * index.num_blocks) if is_decoding else 0)
