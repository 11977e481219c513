"""Allocations of a device's memory, for weights or a KV pool: granted, waiting, or refused.

granted: there is room, or the memory exists already.
waiting: no room now, because memory of a killed process is not free at once.
refused: no room ever, or not within `PATIENCE_S`; the client is dropped.
"""

import logging
import time

from common.base.errors import MemoryShort
from common.memory.base.channel import Gone
from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.devices.backing import gb
from common.memory.server.connections import Client
from common.memory.server.pools import Pools
from common.memory.server.regions import Regions
from common.wire.messages.memory import MemoryRefused, PoolWanted, RegionState, WeightsWanted
from common.wire.values.pool_shape import shown

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Longest wait for memory."""


class Allocations:
    """Requests of all clients for memory; a client waits for at most one."""

    def __init__(self, regions: Regions, pools: Pools) -> None:
        self.regions, self.pools = regions, pools

    def add(self, client: Client, message: WeightsWanted | PoolWanted) -> list[Answer]:
        """Try to grant a client's request, or let the client wait; raises Gone."""
        client.wanted, client.wanted_until_s = message, time.monotonic() + PATIENCE_S
        return self.grant(client)

    def grant(self, client: Client) -> list[Answer]:
        """Grant a client's request if there is room, or keep waiting; raises Gone after a refusal."""
        if (wanted := client.wanted) is None:
            return []
        try:
            answers = self._pool(client, wanted) if isinstance(wanted, PoolWanted) else self._weights(client, wanted)
        except MemoryShort as short:
            if short.is_for_good or time.monotonic() > client.wanted_until_s:
                waited = "" if short.is_for_good else f", for {PATIENCE_S:.0f} s"
                reason = refusal(f"{short}{waited}", wanted, self.regions, self.pools)
                client.channel.send(MemoryRefused(reason))
                raise Gone(f"it wants more than there is: {reason}") from None
            return []
        client.wanted = None
        return answers

    def _pool(self, client: Client, wanted: PoolWanted) -> list[Answer]:
        assert client.worker is not None, "who wants something has said who it is"
        user = User(client.number, client.worker, is_decoding=client.is_decoding)
        answers = self.pools.want(user, wanted.layout, wanted.num_blocks, wanted.floor)
        shape = self.pools.of_client[client.number].index.shape
        logger.info(
            "%s uses the pool of %s KV blocks, %.2f GB, of %s%s",
            client, shown(shape.num_blocks), shape.num_bytes / 1e9, wanted.layout.fingerprint,
            "" if shape.num_blocks == wanted.num_blocks
            else f"; it would have made one of {shown(wanted.num_blocks)}",
        )  # fmt: skip
        return answers

    def _weights(self, client: Client, wanted: WeightsWanted) -> list[Answer]:
        answer = self.regions.want(client.number, wanted)
        state = self.regions.regions[wanted].state_for(client.number)
        what = {RegionState.EMPTY: "fills", RegionState.FILLING: "waits for", RegionState.FILLED: "maps"}[state]
        logger.info("%s %s %.2f GB of weights of %s", client, what, wanted.num_bytes / 1e9, wanted.fingerprint)
        return [answer]


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
