"""What a fault of a device means for others than the worker that met it.

A process that is killed has written what it may and nothing else. A kernel that touched what it may not has perhaps
written elsewhere before that, in anything that its process maps, other workers' blocks and weights among it. So nobody
who comes maps that memory, and those who do stop at once: their requests are computed again from their tokens.
"""

import logging
from collections.abc import Mapping

from common.memory.blocks.answers import Answer
from common.memory.server.clients import Client
from common.memory.server.pools import Pools
from common.memory.server.regions import Regions
from common.wire.messages.memory import MemoryTainted

logger = logging.getLogger(__name__)


def taint(faulty: Client, problem: str, clients: Mapping[int, Client], regions: Regions, pools: Pools) -> list[Answer]:
    """Give what a client maps to nobody else, and tell those who map some of it."""
    sharers = regions.taint(faulty.number) | pools.taint(faulty.number)
    told = sorted((sharers - {faulty.number}) & clients.keys())
    logger.error(
        "%s met a fault of its device, and may have written anywhere in its weights and KV blocks: nobody new gets "
        "those, and these workers start again with others: %s. The fault: %s",
        faulty, ", ".join(str(clients[number]) for number in told) or "no other", problem,
    )  # fmt: skip
    message = MemoryTainted(f"the device met a fault in {faulty}, which may have damaged what both map: {problem}")
    return [Answer(number, message) for number in told]
