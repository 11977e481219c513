"""Reports of a memory server's use: for its heartbeat, and block events for the router."""

from collections.abc import Iterable
from typing import NamedTuple

from common.memory.blocks.event_log import EventLog
from common.memory.devices.backing import Backing
from common.memory.server.pools import Pools
from common.memory.server.regions import Regions
from common.wire.messages.memory import MAX_BYTES
from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady


class Usage(NamedTuple):
    """Blocks by state, summed over groups; the rest are leased or read."""

    num_blocks: int
    num_free: int  # cached blocks included
    num_offered: int
    num_quarantined: int


def usage(pools: Pools) -> Usage:
    """Return the sums over all pools."""
    indexes = [pool.index for pool in set(pools.of_client.values())]
    return Usage(
        num_blocks=sum(sum(index.shape.capacity) for index in indexes),
        num_free=sum(sum(index.num_free) for index in indexes),
        num_offered=sum(len(offered.leased) for index in indexes for offered in index.offers.values()),
        num_quarantined=sum(index.num_quarantined.total() for index in indexes),
    )


def num_cached(pools: Pools) -> int:
    """Return the number of cached blocks, included in the free blocks of `usage`."""
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
    )
