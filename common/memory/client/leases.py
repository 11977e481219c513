"""Blocks leased by a worker, at hand or in use, and sealed blocks read by the worker. Sends nothing."""

from collections.abc import Iterable, Sequence

import numpy as np

from common.base.errors import KVError
from common.memory.client.readings import Readings, as_ids
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape


class Leases:
    """Leased blocks of a pool. In messages about a text, sealed blocks come first."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.readings = Readings(shape.num_ids)  # of sealed blocks
        self._at_hand: list[list[int]] = [[] for _ in shape.capacity]  # by group
        self._is_at_hand = np.zeros(shape.num_ids, bool)
        self._generation = np.zeros(shape.num_ids, np.int32)  # by block; 0 if not leased
        self._num_leased = [0] * len(shape.capacity)  # by group

    @property
    def num_free(self) -> Counts:
        """Blocks at hand, by group."""
        return tuple(map(len, self._at_hand))

    @property
    def num_unused(self) -> Counts:
        """Blocks of the pool not in use by this worker, by group."""
        columns = zip(self.shape.capacity, self._num_leased, self._at_hand, strict=True)
        first, *others = (capacity - num_leased + len(at_hand) for capacity, num_leased, at_hand in columns)
        return (first - len(self.readings), *others)

    @property
    def in_use(self) -> list[int]:
        """Leased blocks that are not at hand, and may be written."""
        in_use: list[int] = np.flatnonzero((self._generation != 0) & ~self._is_at_hand).tolist()
        return in_use

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return generations of blocks in use, sealed blocks first: [num_ids] int32."""
        generations: np.ndarray = self._generation[as_ids(block_ids)]
        if num_sealed := self.readings.num_first(block_ids):
            generations[:num_sealed] = self.readings.generations(block_ids[:num_sealed])
        return generations

    def adopt(self, block_ids: Sequence[int], generations: Sequence[int], num_sealed: int = 0) -> None:
        """Put blocks of the server or of another worker in use; the first `num_sealed` are sealed."""
        if num_sealed:
            self.readings.add(block_ids[:num_sealed], generations[:num_sealed])
            block_ids, generations = block_ids[num_sealed:], generations[num_sealed:]
        self._count(block_ids, 1)
        self._generation[as_ids(block_ids)] = generations

    def take(self, counts: Counts) -> list[list[int]]:
        """Put blocks of each group in use, which must be at hand."""
        taken = []
        for at_hand, count in zip(self._at_hand, counts, strict=True):
            taken.append(at_hand[: -count - 1 : -1])
            del at_hand[len(at_hand) - count :]
            self._is_at_hand[taken[-1]] = False
        return taken

    def put_back(self, block_ids: Sequence[int]) -> None:
        """Put blocks in use at hand again; raises KVError for blocks not in use here."""
        self._is_at_hand[self._checked(block_ids)] = True
        for at_hand, of_group in zip(self._at_hand, self.shape.by_group(block_ids), strict=True):
            at_hand += of_group

    def end(self, block_ids: Sequence[int]) -> np.ndarray:
        """End leases of blocks in use, and return generations: [num_ids] int32."""
        ids = self._checked(block_ids)
        generations: np.ndarray = self._generation[ids]
        self._generation[ids] = 0
        self._count(block_ids, -1)
        return generations

    def release(self, block_ids: Sequence[int]) -> np.ndarray:
        """Give blocks in use to another worker, sealed blocks first. Return generations: [num_ids] int32."""
        generations, num_sealed = self.generations(block_ids), self.readings.num_first(block_ids)
        self.end(block_ids[num_sealed:])
        if num_sealed:
            self.readings.take(block_ids[:num_sealed])
        return generations

    def _count(self, block_ids: Sequence[int], sign: int) -> None:
        for number, count in enumerate(self.shape.count(block_ids)):
            self._num_leased[number] += sign * count

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return the ids as an array; raises KVError unless each block is in use here and named once."""
        ids = as_ids(block_ids)
        are_in_use = (self._generation[ids] != 0) & ~self._is_at_hand[ids]
        if not are_in_use.all():
            raise KVError(f"block {ids[~are_in_use][0]} is not in use here: it was freed twice, or never leased")
        if len(set(block_ids)) != len(ids):
            raise KVError(f"a block is named twice among {len(ids)}")
        return ids


def check_owned(leases: Leases, owned: Iterable[Iterable[int]]) -> None:
    """Raise KVError unless `owned` lists each block in use once, and each sealed block as often as read."""
    seen = sorted(block_id for block_ids in owned for block_id in block_ids)
    in_use = sorted([*leases.in_use, *leases.readings])
    if seen != in_use:
        raise KVError(f"{len(seen)} blocks accounted for, {len(in_use)} in use")
