"""Slabs of a pool: the owner of each, its free blocks, and how many of its blocks are cached.

    vacant: all blocks are free, so the slab belongs to nobody.
    owned:  the slab holds blocks of a group that are in use or cached.
    pinned: owned, with a block in use. The proof block of a group is always in use.

Knows no keys and no clients. The law of what fits is in `slabs`.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape
from common.wire.values.slabs import Pins, Room

VACANT = -1
"""Owner of a vacant slab."""


class SlabTable:
    """All slabs of a pool. A pool of a single group has a single slab, which is never vacant."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape, self.slabs = shape, shape.slabs
        num_slabs, self._groups = self.slabs.num_slabs, range(len(self.slabs.floor))
        self.free_ids: list[list[int]] = [[] for _ in range(num_slabs)]  # of the owner, the next to be taken last
        self.owner = np.full(num_slabs, VACANT, np.intp)
        self.num_free = np.zeros(num_slabs, np.intp)
        self.num_cached = np.zeros(num_slabs, np.intp)
        self.last_cached = np.zeros(num_slabs, np.int64)  # latest `tick` of a block cached in the slab
        self.tick = 0  # counts calls of `cache`
        self._size = np.array(self.slabs.num_in_each, np.intp)  # blocks of a slab, by group
        self._vacant = list(range(num_slabs))  # a heap
        self._is_one = num_slabs == 1
        self._room: Room | None = None  # until the next change
        self._slab_of = np.zeros(shape.num_ids, np.intp)  # by block
        for group in self._groups if num_slabs > 1 else ():
            for slab in range(num_slabs):
                ids = shape.ids_in(group, slab)
                self._slab_of[ids.start : ids.stop] = slab
        for group in self._groups:  # the proof block of each is in the slab of its number
            self.take_vacant(group)
            self.free_ids[group].pop()
            self.num_free[group] -= 1

    @property
    def room(self) -> Room:
        """Room of the pool at this moment."""
        if self._room is None:
            left = self.num_free + self.num_cached
            of_group = [self._are_pinned & (self.owner == group) for group in self._groups]
            spare = tuple(int(left[mine].sum()) for mine in of_group)
            self._room = Room(self.slabs, spare, tuple(int(np.count_nonzero(mine)) for mine in of_group))
        return self._room

    @property
    def num_used(self) -> Counts:
        """Blocks in use, neither free nor cached, by group."""
        used = self._size[self.owner] - self.num_free - self.num_cached
        return tuple(int(used[self.owner == group].sum()) - 1 for group in self._groups)  # without the proof block

    @property
    def num_owned(self) -> Counts:
        """Slabs of each group."""
        return tuple(int(np.count_nonzero(self.owner == group)) for group in self._groups)

    @property
    def _are_pinned(self) -> np.ndarray:
        """Tell for each slab whether a block is in use: [num_slabs] bool."""
        are_pinned: np.ndarray = (self.owner != VACANT) & (self.num_free + self.num_cached < self._size[self.owner])
        return are_pinned

    def pins(self, unread: Sequence[np.ndarray], *, is_empty: bool = False) -> Pins:
        """Return the slabs that are pinned by reading blocks of each group: [num_blocks] intp.

        Args:
            is_empty: ask for a pool in which no other block is in use.
        """
        if len(self._groups) == 1:
            return Pins((0,), (0,))
        are_pinned = np.arange(len(self.owner)) < len(self._groups) if is_empty else self._are_pinned
        slabs = [np.unique(self._slab_of[block_ids]) for block_ids in unread]
        counts = [int(np.count_nonzero(~are_pinned[of_group])) for of_group in slabs]
        sizes = self.slabs.num_in_each
        return Pins(tuple(counts), tuple(count * size for count, size in zip(counts, sizes, strict=True)))

    def take(self, group: int, count: int, num_pinned: int = 0) -> list[int]:
        """Take free blocks of a group, at most `count`, out of pinned slabs; the fullest come first.

        Args:
            num_pinned: take blocks out of so many slabs that are not pinned instead; the emptiest come first.
        """
        if self._is_one:
            slabs = [0]
        else:
            have = np.flatnonzero((self.owner == group) & (self.num_free > 0) & (self._are_pinned != bool(num_pinned)))
            order = (self.num_cached if num_pinned else self.num_free + self.num_cached)[have]
            slabs = have[np.argsort(order, kind="stable")][: num_pinned or None].tolist()
        self._room = None
        taken: list[int] = []
        for slab in slabs:
            free_ids = self.free_ids[slab]
            num_taken = min(count - len(taken), len(free_ids))
            taken += free_ids[: -num_taken - 1 : -1]
            del free_ids[len(free_ids) - num_taken :]
            self.num_free[slab] -= num_taken
            if len(taken) == count:
                break
        return taken

    def take_vacant(self, group: int, num_slabs: int = 1) -> bool:
        """Give the first vacant slabs to a group, at most `num_slabs`; return false if no slab is vacant."""
        if not self._vacant:
            return False
        for _ in range(min(num_slabs, len(self._vacant))):
            slab = heapq.heappop(self._vacant)
            self.owner[slab], self.num_free[slab] = group, self._size[group]
            self.free_ids[slab] = [*reversed(self.shape.ids_in(group, slab))]
        self._room = None
        return True

    def free(self, block_ids: Sequence[int]) -> None:
        """Take back blocks that are neither in use nor cached; slabs without other blocks are vacant then."""
        self._room = None
        if self._is_one:
            self.free_ids[0] += block_ids
            self.num_free[0] += len(block_ids)
            return
        slabs = self._slab_of[np.asarray(block_ids, np.intp)]
        for block_id, slab in zip(block_ids, slabs.tolist(), strict=True):
            self.free_ids[slab].append(block_id)
        self.num_free += np.bincount(slabs, minlength=len(self.owner))
        touched = np.unique(slabs)
        for slab in touched[self.num_free[touched] == self._size[self.owner[touched]]].tolist():
            self.owner[slab], self.num_free[slab], self.free_ids[slab] = VACANT, 0, []
            heapq.heappush(self._vacant, slab)

    def cache(self, block_ids: np.ndarray) -> None:
        """Count blocks, [num_blocks] intp, as cached from now on, because nobody uses them any more."""
        self.tick += 1
        if not self._is_one:
            self.last_cached[self._slab_of[block_ids]] = self.tick
        self._count_cached(block_ids, 1)

    def uncache(self, block_ids: np.ndarray) -> None:
        """Count blocks, [num_blocks] intp, as cached no more: they are read, or about to be freed."""
        self._count_cached(block_ids, -1)

    def _count_cached(self, block_ids: np.ndarray, sign: int) -> None:
        self._room = None
        if self._is_one:
            self.num_cached[0] += sign * len(block_ids)
        else:
            self.num_cached += sign * np.bincount(self._slab_of[block_ids], minlength=len(self.owner))

    def are_pinned(self, block_ids: np.ndarray) -> np.ndarray:
        """Tell for each block whether its slab is pinned: [num_blocks] bool."""
        are_pinned: np.ndarray = self._are_pinned[self._slab_of[block_ids]]
        return are_pinned

    def oldest_of_others(self, group: int) -> tuple[int, int] | None:
        """Return the unpinned slab of another group cached longest ago, and the `last_cached` of the slab."""
        others = np.flatnonzero((self.owner != VACANT) & (self.owner != group) & ~self._are_pinned)
        if not len(others):
            return None
        slab = int(others[np.argmin(self.last_cached[others])])
        return slab, int(self.last_cached[slab])

    def ids_of(self, slab: int) -> np.ndarray:
        """Return all blocks of an owned slab: [num_blocks] intp."""
        ids = self.shape.ids_in(int(self.owner[slab]), slab)
        return np.arange(ids.start, ids.stop)
