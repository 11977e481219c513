"""Heartbeat of a memory server."""

from collections.abc import Iterable

from common.memory.devices.backing import Backing
from common.memory.host_tier.tier import HostTier
from common.memory.server.pools import Pools
from common.memory.server.regions import Regions
from common.wire.messages.memory import MAX_BYTES
from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady


def heartbeat(
    ready: MemoryReady, backing: Backing, regions: Regions, pools: Pools, worker_ids: Iterable[str]
) -> MemoryHeartbeat:
    """Build a heartbeat: memory use, device load, connected workers."""
    usage, use = pools.usage(), backing.use()
    return MemoryHeartbeat(
        server_id=ready.server_id,
        epoch=ready.epoch,
        weights_bytes=min(regions.num_bytes, MAX_BYTES),
        free_bytes=min(backing.free_bytes(), MAX_BYTES),
        num_blocks=usage.num_blocks,
        num_free_blocks=usage.num_free,
        num_cached_blocks=pools.num_cached,
        num_offered_blocks=usage.num_offered,
        num_quarantined_blocks=usage.num_quarantined,
        **_of_tier(pools.tier),
        worker_ids=tuple(worker_ids),
        gpu_percent=use.percent,
        gpu_celsius=use.celsius,
    )


def _of_tier(tier: HostTier | None) -> dict[str, int]:
    names = ("num_host_blocks", "host_bytes", "num_restored_blocks", "copied_out_bytes", "copied_in_bytes")
    if tier is None:
        return dict.fromkeys(names, 0)
    traffic = tier.traffic
    counts = (len(tier.slots), tier.room.num_bytes, traffic.num_restored, traffic.out_bytes, traffic.in_bytes)
    return dict(zip(names, counts, strict=True))
