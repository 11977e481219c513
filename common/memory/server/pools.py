"""All KV pools of a device, and handoffs of blocks. Knows clients by number, and no sockets."""

import secrets
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np

from common.base.errors import MemoryShort
from common.memory.base.pattern import pattern
from common.memory.blocks.answers import Answer, Misbehaved
from common.memory.blocks.event_log import EventLog
from common.memory.blocks.index import BlockIndex, OfferKey
from common.memory.blocks.pool import Pool, User, packed
from common.memory.devices.backing import Memory
from common.memory.host_tier.tier import HostTier
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksSealed,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    OfBlocks,
    PoolLeft,
    PoolRegion,
    PoolShortage,
    PromptBlocks,
    PromptUnwanted,
    PromptWanted,
)
from common.wire.values.fields import KEY_BYTES
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape, are_enough, shown

Done = BlocksSealed | KVOffer | KVAccepted | KVDeclined
"""Messages of work done, counted in `num_done`; `BlocksWanted` and `BlocksFreed` may come from stuck workers."""
MAX_BLOCK_BYTES = 128 * 1024 * 1024
NAN_BYTE = 0xFF
"""Makes NaN of every floating point type."""


class Usage(NamedTuple):
    """Blocks by state, summed over groups; the rest are leased or read."""

    num_blocks: int
    num_free: int  # cached blocks included
    num_offered: int
    num_quarantined: int


class Pools:
    """All KV pools of a device; a client uses at most one pool.

    Args:
        allocate: allocates bytes; raises MemoryShort.
        reserve: share of a pool that prompts leave to decoding.
        poisons: fill free blocks with NaN, so reads of unwritten data are noticed.
        tier: host memory for sealed blocks beyond the pool's room.
    """

    def __init__(
        self, allocate: Callable[[int], Memory], reserve: float, *, poisons: bool, tier: HostTier | None = None
    ) -> None:
        self.allocate, self.reserve, self.poisons, self.tier = allocate, reserve, poisons, tier
        self.pools: dict[KVLayout, Pool] = {}  # open to new clients
        self.of_client: dict[int, Pool] = {}  # gone clients stay until `cure`

    def want(self, user: User, layout: KVLayout, num_blocks: Counts) -> list[Answer]:
        """Let a worker use the pool of a layout; the first worker's `num_blocks` sizes the pool.

        Raises Misbehaved, and MemoryShort without room; the caller may try again.
        """
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
        """Let a guest read the pool with this id; return no answers without such a pool."""
        for pool in self.pools.values():
            if pool.pool_id == pool_id:
                self.of_client[guest.client] = pool
                pool.users[guest.client] = guest
                region = PoolRegion(pool.pool_id, pool.memory.handle, pool.index.shape.num_blocks)
                return [Answer(guest.client, region, pool.memory.descriptor)]
        return []

    def heed(self, client: int, message: OfBlocks) -> list[Answer]:
        """Handle a client's message about blocks; raises Misbehaved."""
        if isinstance(message, Done):
            self._pool_of(client).num_done += 1
        match message:
            case BlocksWanted():
                return self.want_blocks(client, message.num_blocks)
            case BlocksSealed():
                return self.seal(client, message)
            case PromptWanted() | PromptUnwanted():
                return self.want_prompt(client, message)
            case BlocksFreed():
                return self.freed(client, message)
            case KVOffer():
                return self.offered(client, message)
            case KVReceived() | KVAccepted():
                return self.taken(client, message)
            case KVDeclined():
                return self.declined(client, message)
            case PoolLeft():
                return self.left(client, message)

    def want_blocks(self, client: int, counts: Counts) -> list[Answer]:
        """Grant blocks now or later, in place of the client's earlier want."""
        pool = self._pool_of(client)
        capacity = pool.index.shape.capacity
        if len(counts) != len(capacity) or not are_enough(capacity, counts):
            raise Misbehaved(f"{counts} blocks of a pool that has {capacity} to give")
        if not any(counts):
            pool.unwant((client, "", 0))
        else:
            pool.want(client, counts)
        return pool.deal()

    def seal(self, client: int, message: BlocksSealed) -> list[Answer]:
        """Seal blocks written by a client, so other clients find them."""
        pool = self._pool_of(client)
        pool.index.seal(client, *_blocks(message), message.keys)
        if self.tier is not None:
            self.tier.sealed(pool, message.keys)
        return []

    def want_prompt(self, client: int, message: PromptWanted | PromptUnwanted) -> list[Answer]:
        """Grant all blocks of a prompt now or later, or forget the want; answer a guest with readable blocks."""
        pool, index = self._pool_of(client), self._pool_of(client).index
        if isinstance(message, PromptUnwanted):
            pool.unwant((client, message.request_id, message.attempt))
            return pool.deal()
        if pool.users[client].is_guest:
            block_ids = index.sealed.match(client, message.keys)
            blocks = packed(block_ids, index.generations(block_ids))
            return [Answer(client, PromptBlocks(message.request_id, message.attempt, *blocks, len(block_ids)))]
        num_keys, capacity = len(message.keys) // KEY_BYTES, index.shape.capacity
        if not num_keys <= message.num_blocks <= capacity[0]:
            raise Misbehaved(f"{message.num_blocks} blocks for {num_keys} keys, of a pool that has {capacity[0]}")
        pool.want(client, (message.num_blocks, *index.shape.layout.nothing[1:]), message)
        return pool.deal()

    def freed(self, client: int, message: BlocksFreed) -> list[Answer]:
        """Take blocks back, and deal."""
        pool = self._pool_of(client)
        pool.index.free(client, *_blocks(message))
        return pool.deal()

    def offered(self, client: int, message: KVOffer) -> list[Answer]:
        """Pass an offer to a decode worker; decline the offer and free its blocks if the worker is unknown."""
        pool = self._pool_of(client)
        worker = message.decode_worker_id, message.decode_epoch
        takers = (user for user in pool.users.values() if user.is_decoding or user.is_guest)
        target = next((user.client for user in takers if user.worker == worker), None)
        if target is None:
            pool.index.free(client, *_blocks(message))
            return [Answer(client, KVDeclined(message.request_id, message.attempt)), *pool.deal()]
        key = OfferKey(target, message.request_id, message.attempt)
        pool.index.offer(client, key, *_blocks(message), message.num_sealed)
        pool.senders[key] = client
        return [Answer(target, message)]

    def taken(self, client: int, message: KVReceived | KVAccepted) -> list[Answer]:
        """Note the receipt of an offer; lease its blocks to the client if accepted."""
        pool, key = self._pool_of(client), OfferKey(client, message.request_id, message.attempt)
        if isinstance(message, KVAccepted):
            pool.index.accept(key)
        elif key not in pool.index.offers:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is not offered to it")
        return pool.received(key)

    def declined(self, client: int, message: KVDeclined) -> list[Answer]:
        """Free the blocks of a declined offer."""
        pool, key = self._pool_of(client), OfferKey(client, message.request_id, message.attempt)
        pool.index.decline(key)
        return [*pool.undelivered([key]), *pool.deal()]

    def left(self, client: int, message: PoolLeft) -> list[Answer]:
        """Take back all blocks and offers of a client, except blocks its device may still write."""
        pool = self._pool_of(client)
        pool.index.retain(client, *_blocks(message))
        return [*pool.drop_user(client), *pool.deal()]

    def leave(self, client: int) -> list[Answer]:
        """Remove a disconnected client, which may still write blocks until `cure`. A guest is cured at once."""
        if client not in self.of_client:
            return []
        pool = self.of_client[client]
        user = pool.users.get(client)
        void = pool.drop_user(client)
        pool.index.leave(client)
        return [*void, *(self.cure(client) if user is not None and user.is_guest else pool.deal())]

    def cure(self, client: int) -> list[Answer]:
        """Free blocks of a gone client after its last write; close a pool without users."""
        if client not in self.of_client:
            return []
        pool = self.of_client.pop(client)
        pool.index.cure(client)
        if pool not in self.of_client.values():
            self._retire(pool)
            if self.tier is not None:
                self.tier.detach(pool, keeps=True)
            pool.index.sealed.log.stop()
            pool.memory.close()
            return []
        return pool.deal()

    def taint(self, client: int) -> set[int]:
        """Retire the pool of a client, so new workers get another pool; return all its users."""
        if client not in self.of_client:
            return set()
        pool = self.of_client[client]
        self._retire(pool)
        if self.tier is not None:
            self.tier.detach(pool, keeps=False)
        pool.index.sealed.log.void()
        return set(pool.users)

    def tend(self) -> list[Answer]:
        """Deal again to wants whose blocks were restored."""
        if self.tier is None:
            return []
        answers: list[Answer] = []
        for pool, restore in self.tier.tend():
            for want in restore.wants:
                want.is_restoring = False
            answers += pool.deal()  # while the tier still reads the restored blocks
            self.tier.let_go(restore)
            answers += pool.deal()
        return answers

    def num_quarantined(self, client: int) -> int:
        """Return the number of blocks that a gone client may still write."""
        return self.of_client[client].index.num_quarantined[client] if client in self.of_client else 0

    def holds_up_others(self, client: int) -> bool:
        """Tell whether others wait for blocks while this client holds blocks or undecided offers."""
        if client not in self.of_client:
            return False
        pool = self.of_client[client]
        has_offers = any(key.client == client for key in pool.index.offers)
        return pool.is_waited_for(but=client) and (pool.index.holds(client) or has_offers)

    def num_done(self, client: int) -> int:
        """Return the seals and changes of hands in the client's pool; 0 without a pool."""
        pool = self.of_client.get(client)
        return pool.num_done if pool is not None else 0

    def usage(self) -> Usage:
        """Return the sums over all pools."""
        indexes = [pool.index for pool in set(self.of_client.values())]
        return Usage(
            num_blocks=sum(sum(index.shape.capacity) for index in indexes),
            num_free=sum(sum(index.num_free) for index in indexes),
            num_offered=sum(index.num_offered for index in indexes),
            num_quarantined=sum(index.num_quarantined.total() for index in indexes),
        )

    @property
    def is_copying(self) -> bool:
        """Tell whether blocks are on their way from or to host memory."""
        return self.tier is not None and self.tier.is_busy

    @property
    def num_cached(self) -> int:
        """Cached blocks, included in the free blocks of `usage`."""
        return sum(len(pool.index.sealed.cached) for pool in set(self.of_client.values()))

    def log_of(self, pool_id: int) -> EventLog | None:
        """Return the event log of a pool, if the pool exists."""
        pools = set(self.of_client.values())
        return next((pool.index.sealed.log for pool in pools if pool.pool_id == pool_id), None)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
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
        pool = Pool(shape.layout, pool_id, memory, index, self.reserve)
        if self.tier is not None:
            self.tier.attach(pool)
            pool.restore = self.tier.ask
        return pool


def _blocks(message: BlocksSealed | BlocksFreed | PoolLeft | KVOffer) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, [num_blocks] intp, and generations, [num_blocks] int32, of a message."""
    return np.frombuffer(message.block_ids, np.int32).astype(np.intp), np.frombuffer(message.generations, np.int32)
