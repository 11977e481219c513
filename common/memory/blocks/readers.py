"""References of readers to a pool's sealed blocks, counted, because several texts of a reader may begin alike.

Knows clients by number. Messages name thousands of blocks, so counts are arrays by block id.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np


class Named(NamedTuple):
    """Distinct blocks of a message, with counts, because several texts of a reader may begin alike."""

    block_ids: np.ndarray  # [num_blocks] intp, each once, in order of first mention
    times: np.ndarray | int  # mentions of each: [num_blocks] int64, or a number for all
    total: int  # sum of `times`


NONE_NAMED = Named(np.zeros(0, np.intp), 1, 0)


def named(block_ids: np.ndarray) -> Named:
    """Count ids in any order: [num_named] intp."""
    ids = block_ids.tolist()
    if len(set(ids)) == len(ids):
        return Named(block_ids, 1, len(ids))
    times = Counter(ids)
    return Named(np.array(list(times), np.intp), np.array(list(times.values()), np.int64), len(ids))


class Readers:
    """Clients that read blocks with ids below `num_ids`."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self.num_references = np.zeros(num_ids, np.int64)  # by block, offers included
        self.of_client: dict[int, np.ndarray] = {}  # references by block, for each client
        self.num_of_client: Counter[int] = Counter()  # references in all

    def reads(self, client: int, blocks: Named) -> bool:
        """Tell whether the client reads each block as often as named."""
        if (references := self.of_client.get(client)) is None:
            return not blocks.total
        return not np.count_nonzero(references[blocks.block_ids] < blocks.times)

    def add(self, client: int, blocks: Named) -> None:
        self.num_references[blocks.block_ids] += blocks.times
        self._count(client, blocks, 1)

    def move(self, client: int, other: int, blocks: Named) -> None:
        """Move references from a client, which must have them, to another."""
        self._count(client, blocks, -1)
        self._count(other, blocks, 1)

    def remove(self, client: int, blocks: Named) -> np.ndarray:
        """End references of a client. Return blocks now unread, last named first: [num_unread] intp."""
        self._count(client, blocks, -1)
        return self.end(blocks)

    def pop(self, client: int) -> np.ndarray | None:
        """Remove a client; return its references by block, for the caller to `end`; None if there are none."""
        references = self.of_client.pop(client, None)
        return references if self.num_of_client.pop(client, 0) else None

    def end(self, blocks: Named) -> np.ndarray:
        """End references of no client any more. Return blocks now unread, last named first: [num_unread] intp."""
        num_left = self.num_references[blocks.block_ids] - blocks.times
        self.num_references[blocks.block_ids] = num_left
        unread: np.ndarray = blocks.block_ids[num_left == 0][::-1]
        return unread

    def _count(self, client: int, blocks: Named, sign: int) -> None:
        if not blocks.total:
            return
        if client not in self.of_client:
            self.of_client[client] = np.zeros(self.num_ids, np.int64)
        self.of_client[client][blocks.block_ids] += sign * blocks.times
        self.num_of_client[client] += sign * blocks.total
