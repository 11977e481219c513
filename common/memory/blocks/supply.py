"""Blocks for leases, in this order: free ones in pinned slabs, free ones in other slabs of the group, a vacant slab.

Without these, cached blocks are evicted: the longest cached ones of the group, or all of another group's slab. The slab
is chosen if all its blocks were cached still longer ago. A slab is only pinned while the rest of the lease fits then
(see `slabs`). So a lease
that fits gets its blocks, and groups get back memory that they lent.
"""

from collections.abc import Callable

import numpy as np

from common.memory.blocks.sealed import SealedBlocks
from common.memory.blocks.slab_table import SlabTable
from common.wire.values.kv_layout import Counts


class Supply:
    """Source of blocks for leases.

    Args:
        release: makes evicted blocks free.
    """

    def __init__(self, slabs: SlabTable, sealed: SealedBlocks, release: Callable[[np.ndarray], None]) -> None:
        self.slabs, self.sealed, self._release = slabs, sealed, release

    def take(self, counts: Counts) -> list[int]:
        """Take blocks of each group out of the free ones, group after group; `counts` must fit the pool's room."""
        if len(counts) == 1:
            [count] = counts
            if (num_lacking := count - int(self.slabs.num_free[0])) > 0:
                self._release(self.sealed.evict(0, num_lacking))
            return self.slabs.take(0, count)
        rest, taken = list(counts), list[int]()
        for group in range(len(counts)):
            while rest[group]:
                block_ids = self._some(group, rest)
                rest[group] -= len(block_ids)
                taken += block_ids
        return taken

    def _some(self, group: int, rest: list[int]) -> list[int]:
        """Take some free blocks of a group; without any, make room for the next call."""
        slabs, lacking = self.slabs, rest[group]
        if block_ids := slabs.take(group, lacking):
            return block_ids
        if not (num_slabs := slabs.room.num_more(group, tuple(rest))):
            cached = self.sealed.cached[group].block_ids
            self._release(self.sealed.evict_these(group, cached[slabs.are_pinned(cached)][:lacking]))
            return []
        if block_ids := slabs.take(group, lacking, num_slabs):
            return block_ids
        if not slabs.take_vacant(group, min(num_slabs, -(-lacking // slabs.slabs.num_in_each[group]))):
            self._evict(group, lacking)
        return []

    def _evict(self, group: int, count: int) -> None:
        """Evict the longest cached blocks of the group, at most `count`, or a slab of another group cached before."""
        own, other = self.sealed.cached[group].oldest(count), self.slabs.oldest_of_others(group)
        if other is not None:
            slab, last_cached = other
            own = own[self.sealed.tick[own] <= last_cached]
            if not len(own):
                owner, block_ids = int(self.slabs.owner[slab]), self.slabs.ids_of(slab)
                cached = block_ids[self.sealed.cached[owner].have(block_ids)]
                self._release(self.sealed.evict_these(owner, cached))
                return
        self._release(self.sealed.evict(group, len(own)))
