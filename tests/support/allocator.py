"""An allocator that has a pool to itself, for what needs one and no memory server."""

from collections.abc import Iterable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from common.base.errors import KVError, OutOfBlocks
from common.kv.blocks import Allocator
from common.memory.client.lease_cache import LeaseCache
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape, are_enough, shown

if TYPE_CHECKING:  # because torch takes two seconds of each process that is started with fakes
    from common.kv.transport import Pull


class BlockAllocator:
    """Of a pool of this worker's own: all or nothing, and every id but the proof blocks is free or has one owner."""

    demand = SimpleNamespace(is_short=False)

    def __init__(self, shape: PoolShape) -> None:
        if min(shape.num_blocks) < 2:
            counts = shown(shape.num_blocks)
            raise KVError(f"a pool of {counts} blocks holds nothing beside the proof block")
        self.shape = shape
        self.capacity = shape.assured
        self._free = [list(reversed(ids)) for ids in disjoint_ids(shape)]
        self._all = sorted(chain.from_iterable(self._free))
        self._others: set[int] = set()  # that were given away
        self._is_free = bytearray([1]) * shape.num_ids
        for block_id in shape.proof_ids:
            self._is_free[block_id] = 0

    @property
    def num_free(self) -> Counts:
        return tuple(map(len, self._free))

    @property
    def num_unused(self) -> Counts:
        """The same as those that are free."""
        return self.num_free

    def has(self, counts: Counts) -> bool:
        """Whether so many are free."""
        return are_enough(self.num_free, counts)

    def fetch(self, counts: Counts) -> bool:
        """The same: there is nobody to ask."""
        return self.has(counts)

    def is_exhausted(self) -> bool:
        """Always: nobody else has blocks."""
        return True

    def allocate(self, counts: Counts) -> list[list[int]]:
        """So many blocks of each group, or OutOfBlocks and none."""
        if not self.has(counts):
            free, capacity = shown(self.num_free), shown(self.capacity)
            raise OutOfBlocks(f"{shown(counts)} blocks wanted, {free} of {capacity} free")
        taken = [[free.pop() for _ in range(count)] for free, count in zip(self._free, counts, strict=True)]
        for block_ids in taken:
            for block_id in block_ids:
                self._is_free[block_id] = 0
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back; raises KVError when one is free already, which would give it two owners."""
        for free, freed in zip(self._free, self.shape.by_group([*block_ids]), strict=True):
            for block_id in freed:
                if self._is_free[block_id] or block_id in self.shape.proof_ids:
                    raise KVError(f"block {block_id} was freed twice")
                self._is_free[block_id] = 1
                free.append(block_id)

    def check(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise KVError unless `owned` and the free lists together are every block, each once."""
        seen = [block_id for block_ids in (*owned, *self._free, self._others) for block_id in block_ids]
        if sorted(seen) != self._all:
            raise KVError(f"{len(seen)} blocks accounted for, {sum(self.capacity)} in the pool")

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Each its own number, as if it were leased once."""
        return np.array(block_ids, np.int32)

    def release(self, block_ids: Sequence[int]) -> np.ndarray:
        """They are another's."""
        self._others |= set(block_ids)
        return self.generations(block_ids)

    def take_back(self, block_ids: Sequence[int]) -> None:
        """Others are done with them: they are free."""
        self._others -= set(block_ids)
        self.free(block_ids)


def disjoint_ids(shape: PoolShape) -> list[list[int]]:
    """Blocks of each group that share no byte with another's, without proof blocks: as many as are assured."""
    begin, ids = len(shape.num_blocks), list[list[int]]()
    for group, (count, proof_id) in enumerate(zip(shape.slabs.floor, shape.proof_ids, strict=True)):
        slabs = [group, *range(begin, begin + count - 1)]
        begin += count - 1
        ids.append([i for slab in slabs for i in shape.ids_in(group, slab) if i != proof_id])
    return ids


def check_owned(allocator: Allocator, owned: Iterable[Iterable[int]]) -> None:
    """Fail unless `owned` lists each block in use once, and each sealed block as often as it is read."""
    if isinstance(allocator, BlockAllocator):
        allocator.check(owned)
        return
    assert isinstance(allocator, LeaseCache)
    in_use = sorted([*allocator.in_use, *blocks_read(allocator)])
    assert sorted(block_id for block_ids in owned for block_id in block_ids) == in_use


def blocks_read(leases: LeaseCache) -> list[int]:
    """Sealed blocks, each as often as it is read."""
    counts = leases.references._counts
    ids: list[int] = np.repeat(np.arange(len(counts)), counts).tolist()
    return ids


def no_linger(pull: "Pull", block_ids: list[int]) -> None:
    """Fail, because no pull of a test's proof is late."""
    raise AssertionError(f"a late pull into blocks {block_ids}")
