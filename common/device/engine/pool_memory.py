"""The pool of KV blocks in memory owned by the memory server."""

import torch

from common.base.errors import ConfigError
from common.kv.pool import KVPool
from common.memory.base.pattern import pattern
from common.memory.client.client import MemoryClient
from common.memory.client.mapping import Mapping
from common.memory.client.shared_pool import SharedPool
from common.wire.values.kv_layout import Counts, KVLayout


def claimed_pool(
    client: MemoryClient, layout: KVLayout, num_blocks: Counts, device: torch.device
) -> tuple[KVPool, SharedPool]:
    """Return the pool shared by all workers of the layout and this worker's part, with a block at hand.

    The first worker sets the size. Raises ConfigError or MemoryLost.
    """
    claim = client.claim_pool(layout, num_blocks)
    mapping, shape = Mapping(claim, device), claim.shape
    pool = KVPool(shape, mapping.tensor(writable=True))
    mapping.release()
    expected = (pattern(claim.pool_id, block_id, shape.place(block_id).num_bytes) for block_id in shape.proof_ids)
    if any(pool.read_block(block_id) != each for block_id, each in zip(shape.proof_ids, expected, strict=True)):
        raise ConfigError(
            f"what is mapped on {device} is not the pool of {client.path}: its proof blocks have other bytes; "
            "restart the memory server"
        )
    shared = SharedPool(client, claim)
    shared.await_blocks()
    return pool, shared
