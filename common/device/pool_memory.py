"""Whose the pool of KV blocks is: this process's, or the memory server's."""

from typing import NamedTuple, Protocol

import torch

from common.errors import ConfigError
from common.kv.blocks import Allocator, BlockAllocator
from common.kv.pool import KVPool
from common.kv.transport import Transport
from common.memory.client import MemoryClient
from common.memory.mapping import PoolMapping
from common.memory.pattern import pattern
from common.memory.shared_pool import SharedPool
from common.wire.kv_layout import Counts, KVLayout
from common.wire.pool_shape import PoolShape


class Blocks(NamedTuple):
    """A pool, and what a worker has of it."""

    pool: KVPool
    allocator: Allocator
    shared: SharedPool | None


class PoolOwner(Protocol):
    """Where a pool comes from."""

    weights_bytes: int
    """That it has beside the pool."""

    def make(self, layout: KVLayout, num_blocks: Counts, transport: Transport, device: torch.device) -> Blocks:
        """A pool of so many blocks, or of as many as others have it with; raises ConfigError or MemoryLost."""
        ...


class OwnPool:
    """Memory of this process.

    Args:
        label: names it where the system shows names.
        pool_id: no other pool's.
    """

    weights_bytes = 0

    def __init__(self, label: str, pool_id: int) -> None:
        self.label, self.pool_id = label, pool_id

    def make(self, layout: KVLayout, num_blocks: Counts, transport: Transport, device: torch.device) -> Blocks:
        shape = PoolShape(layout, num_blocks)
        pool = KVPool(shape, transport.allocate(shape.num_bytes, device, self.label), self.pool_id)
        for block_id in shape.proof_ids:
            pool.write_block(block_id, pattern(self.pool_id, block_id, shape.place(block_id).num_bytes))
        return Blocks(pool, BlockAllocator(shape), None)


class ServedPool:
    """Memory of the server, which all workers of a layout share. Whoever comes first says how large it is."""

    def __init__(self, client: MemoryClient, weights_bytes: int) -> None:
        self.client, self.weights_bytes = client, weights_bytes

    def make(self, layout: KVLayout, num_blocks: Counts, transport: Transport, device: torch.device) -> Blocks:
        claim = self.client.claim_pool(layout, num_blocks)
        shape = claim.shape
        pool = KVPool(shape, PoolMapping(claim, device), claim.pool_id)
        expected = (pattern(claim.pool_id, block_id, shape.place(block_id).num_bytes) for block_id in shape.proof_ids)
        if any(pool.read_block(block_id) != each for block_id, each in zip(shape.proof_ids, expected, strict=True)):
            raise ConfigError(
                f"what is mapped on {device} is not the pool of {self.client.path}: its proof blocks have other bytes; "
                "restart the memory server"
            )
        shared = SharedPool(self.client, claim)
        shared.await_blocks()
        return Blocks(pool, shared.magazine, shared)
