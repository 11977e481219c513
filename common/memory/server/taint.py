"""Effect of a device fault on other users of the memory.

A killed process has written only allowed memory. A faulty kernel may have written anywhere in the memory mapped by the
process, other workers' blocks and weights included. So no new worker maps the memory, and all users stop at once.
Requests are computed again from tokens.
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
    """Retire memory mapped by a faulty client, and return messages for its other users."""
    sharers = regions.taint(faulty.number) | pools.taint(faulty.number)
    told = sorted((sharers - {faulty.number}) & clients.keys())
    logger.error(
        "%s met a fault of its device, and may have written anywhere in its weights and KV blocks: nobody new gets "
        "those, and these workers start again with others: %s. The fault: %s",
        faulty, ", ".join(str(clients[number]) for number in told) or "no other", problem,
    )  # fmt: skip
    message = MemoryTainted(f"the device met a fault in {faulty}, which may have damaged what both map: {problem}")
    return [Answer(number, message) for number in told]
