"""All KV pools of a device. Knows clients by number, and no sockets."""

import secrets
from collections.abc import Callable, Iterable

from common.base.errors import MemoryShort
from common.memory.base.pattern import pattern
from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.blocks.index import BlockIndex
from common.memory.blocks.pool import Pool, User
from common.memory.devices.backing import Memory
from common.memory.host_tier.tier import HostTier
from common.memory.server import block_messages
from common.wire.messages.memory import BlocksSealed, OfBlocks, PoolShortage
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape, shown

MAX_BLOCK_BYTES = 256 * 1024 * 1024
NAN_BYTE = 0xFF
"""Makes NaN of every floating point type."""


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
        self.of_client: dict[int, Pool] = {}  # gone clients stay until `reclaim`

    def want(self, user: User, layout: KVLayout, num_blocks: Counts, floor: Counts = ()) -> list[Answer]:
        """Let a worker use the pool of a layout; the first worker shapes the pool.

        Raises ProtocolError, and MemoryShort without room; the caller may try again.
        """
        if user.client in self.of_client:
            raise ProtocolError("it has a pool already")
        if (block_bytes := max(group.block_bytes for group in layout.groups)) > MAX_BLOCK_BYTES:
            raise ProtocolError(f"blocks of {block_bytes} bytes, at most {MAX_BLOCK_BYTES}")
        if layout not in self.pools:
            shape = PoolShape(layout, num_blocks, floor)
            pool = make_pool(shape, self.allocate(shape.num_bytes), self.reserve, poisons=self.poisons)
            if self.tier is not None:
                self.tier.attach(pool)
                pool.restore = self.tier.begin_restore
            self.pools[layout] = pool
        pool = self.of_client[user.client] = self.pools[layout]
        shortage = [Answer(user.client, PoolShortage(True))] if pool.is_short else []
        return [pool.add_user(user), *shortage]

    def visit(self, peer: User, pool_id: int) -> list[Answer]:
        """Let a peer read the pool with this id; return no answers without such a pool."""
        for pool in self.pools.values():
            if pool.pool_id == pool_id:
                self.of_client[peer.client] = pool
                return [pool.add_user(peer)]
        return []

    def handle(self, client: int, message: OfBlocks) -> list[Answer]:
        """Handle a client's message about blocks; raises ProtocolError."""
        pool = self.of_client.get(client)
        if pool is None or client not in pool.users:
            raise ProtocolError("it has no pool, or has left it")
        answers = block_messages.handle(pool, client, message)
        if self.tier is not None and isinstance(message, BlocksSealed):
            self.tier.sealed(pool, message.keys)
        return answers

    def leave(self, client: int) -> list[Answer]:
        """Remove a disconnected client, which may still write blocks until `reclaim`. A peer is reclaimed at once."""
        if client not in self.of_client:
            return []
        pool = self.of_client[client]
        user = pool.users.get(client)
        void = pool.drop_user(client)
        pool.index.leave(client)
        return [*void, *(self.reclaim(client) if user is not None and user.is_peer else pool.grant())]

    def reclaim(self, client: int) -> list[Answer]:
        """Free blocks of a gone client after its last write; close a pool without users."""
        if client not in self.of_client:
            return []
        pool = self.of_client.pop(client)
        pool.index.reclaim(client)
        if pool in self.of_client.values():
            return pool.grant()
        self._retire(pool, keeps=True)
        pool.index.sealed.log.stop()
        pool.memory.close()
        return []

    def taint(self, client: int) -> set[int]:
        """Retire the pool of a client, so new workers get another pool; return all its users."""
        if client not in self.of_client:
            return set()
        pool = self.of_client[client]
        self._retire(pool, keeps=False)
        pool.index.sealed.log.void()
        return set(pool.users)

    def update(self) -> list[Answer]:
        """Advance the host tier, and grant wants whose blocks were restored."""
        if self.tier is None:
            return []
        answers: list[Answer] = []
        for pool, restore in self.tier.update():
            for want in restore.wants:
                want.is_restoring = False
            answers += pool.grant()  # while the tier still reads the restored blocks
            self.tier.release(restore)
            answers += pool.grant()
        return answers

    def num_quarantined(self, client: int) -> int:
        """Return the number of blocks that a gone client may still write."""
        return self.of_client[client].index.num_quarantined[client] if client in self.of_client else 0

    def holds_up_others(self, client: int) -> bool:
        """Tell whether others wait for blocks while this client holds blocks or undecided offers."""
        pool = self.of_client.get(client)
        return pool is not None and pool.holds_up_others(client)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        for pool in set(self.of_client.values()):
            pool.memory.close()

    def _retire(self, pool: Pool, *, keeps: bool) -> None:
        """Give the pool to no new client; the host tier `keeps` its blocks for the next pool."""
        if self.pools.get(pool.layout) is pool:
            del self.pools[pool.layout]
        if self.tier is not None:
            self.tier.detach(pool, keeps=keeps)


def make_pool(shape: PoolShape, memory: Memory, reserve: float, *, poisons: bool) -> Pool:
    """Make a pool over the memory, with its proof blocks; raises MemoryShort if the host has no such memory."""
    pool_id = secrets.randbits(63)

    def poison(block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            memory.fill(*shape.place(block_id), NAN_BYTE)

    index = BlockIndex(shape, poison if poisons else None)
    try:
        if poisons:
            memory.fill(0, shape.num_bytes, NAN_BYTE)
        for block_id in shape.proof_ids:
            offset, size = shape.place(block_id)
            memory.write(offset, pattern(pool_id, block_id, size))
    except OSError as error:
        memory.close()
        counts = shown(shape.num_blocks)
        raise MemoryShort(f"a pool of {counts} blocks, {shape.num_bytes} bytes: {error.strerror}") from None
    return Pool(shape.layout, pool_id, memory, index, reserve)
