"""Text for a worker that wants more memory than available: present users, and advice."""

from common.memory.devices.backing import gb
from common.memory.server.pools import Pools
from common.memory.server.regions import Regions
from common.wire.messages.memory import PoolWanted, WeightsWanted

MAX_NAMED = 4


def refusal(short: str, wanted: WeightsWanted | PoolWanted, regions: Regions, pools: Pools) -> str:
    """Return sentences for the operator of the worker.

    Args:
        short: wanted and available memory, and the time waited.
    """
    size = "kv.pool_bytes or kv." + ("memory_fraction" if regions.backing.device_uuid else "cpu_pool_bytes")
    found = [f"weights of {key.fingerprint}, {gb(key.num_bytes)}" for key in regions.regions]
    advice = f"stop who uses that, or lower {size}, of those workers or of this one"
    for layout, pool in pools.pools.items():
        found.append(f"KV blocks of {layout.fingerprint}, {gb(pool.memory.num_bytes)}")
        if isinstance(wanted, PoolWanted) and layout.fingerprint == wanted.layout.fingerprint:
            found[-1] += f", in another layout ({'; '.join(layout.differences(wanted.layout))})"
            advice = "give all workers of a model the same [model] and [kv] section: then they share one pool"
    here = f"; here are {'; '.join(found[:MAX_NAMED])}" if found else ""
    return f"{short}{here}; {advice}"
