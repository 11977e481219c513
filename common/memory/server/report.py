"""Reports of a memory server's use: for its heartbeat, and block events for the router."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.memory.blocks.event_log import EventLog
from common.memory.blocks.index import BlockIndex
from common.memory.devices.backing import Backing
from common.memory.server.pools import Pools
from common.memory.server.regions import Regions
from common.wire.messages.memory import MAX_BYTES
from common.wire.messages.memory_reports import GroupUse, MemoryHeartbeat, MemoryReady
from common.wire.values.kv_layout import Counts


class Usage(NamedTuple):
    """Blocks by state, as if all were of the main group (see `KVLayout.main`); the rest are leased or read."""

    num_blocks: int
    num_free: int  # cached blocks included
    num_offered: int
    num_quarantined: int


def usage(pools: Pools) -> Usage:
    """Return the sums over all pools."""
    usages = [_usage(pool.index) for pool in set(pools.of_client.values())]
    return Usage(*map(sum, zip(*usages, strict=True))) if usages else Usage(0, 0, 0, 0)


def _usage(index: BlockIndex) -> Usage:
    layout = index.shape.layout
    num_blocks = index.shape.capacity[layout.main]
    return Usage(
        num_blocks=num_blocks,
        num_free=max(0, num_blocks - layout.in_main(index.slabs.num_used)),
        num_offered=layout.in_main(_by_group(index, [offer.leased for offer in index.offers.values()])),
        num_quarantined=layout.in_main(_by_group(index, [index.quarantined])),
    )


def groups(pools: Pools) -> tuple[GroupUse, ...]:
    """Return the use of the latest pool that is open to new clients, by group; () without a pool."""
    if not pools.pools:
        return ()
    *_, pool = pools.pools.values()
    slabs, layout = pool.index.slabs, pool.layout
    columns = zip(layout.groups, slabs.num_used, slabs.num_owned, strict=True)
    return tuple(GroupUse(group.kind, used, num * slabs.slabs.slab_bytes) for group, used, num in columns)


def _by_group(index: BlockIndex, blocks: Sequence[np.ndarray]) -> Counts:
    """Count blocks by group; each array is [num_blocks] intp."""
    counts = np.zeros(len(index.shape.begins), np.intp)
    for block_ids in blocks:
        counts += np.bincount(index.shape.groups_of(block_ids), minlength=len(counts))
    return tuple(counts.tolist())


def num_cached(pools: Pools) -> int:
    """Return the number of cached blocks of all groups; `usage` counts their memory as free."""
    return sum(sum(pool.index.sealed.num_cached) for pool in set(pools.of_client.values()))


def log_of(pools: Pools, pool_id: int) -> EventLog | None:
    """Return the event log of a pool, if the pool exists."""
    return next((pool.index.sealed.log for pool in pools.of_client.values() if pool.pool_id == pool_id), None)


def heartbeat(
    ready: MemoryReady, backing: Backing, regions: Regions, pools: Pools, worker_ids: Iterable[str]
) -> MemoryHeartbeat:
    """Build a heartbeat: memory use, device load, connected workers."""
    blocks, use, tier = usage(pools), backing.use(), pools.tier
    return MemoryHeartbeat(
        server_id=ready.server_id,
        epoch=ready.epoch,
        weights_bytes=min(regions.num_bytes, MAX_BYTES),
        free_bytes=min(backing.free_bytes(), MAX_BYTES),
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free,
        num_cached_blocks=num_cached(pools),
        num_offered_blocks=blocks.num_offered,
        num_quarantined_blocks=blocks.num_quarantined,
        num_host_blocks=len(tier.slots) if tier else 0,
        host_bytes=tier.room.num_bytes if tier else 0,
        num_restored_blocks=tier.traffic.num_restored if tier else 0,
        copied_out_bytes=tier.traffic.out_bytes if tier else 0,
        copied_in_bytes=tier.traffic.in_bytes if tier else 0,
        worker_ids=tuple(worker_ids),
        gpu_percent=use.percent,
        gpu_celsius=use.celsius,
        groups=groups(pools),
    )
