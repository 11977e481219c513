"""Blocks held by a worker: leased blocks, at hand or in use, and references to sealed blocks. Sends nothing."""

from collections.abc import Sequence

import numpy as np

from common.base.errors import KVError
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape


class References:
    """References to sealed blocks, counted, because several texts of a worker may begin alike.

    The memory server counts alike.
    """

    def __init__(self, num_ids: int) -> None:
        self._counts = np.zeros(num_ids, np.int32)
        self._generation = np.zeros(num_ids, np.int32)
        self._num_blocks = 0

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return self._num_blocks

    def num_first(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks are read here; sealed blocks come first in a text."""
        if not len(block_ids) or not self._counts[block_ids[0]]:
            return 0
        others = np.flatnonzero(self._counts[as_ids(block_ids)] == 0)
        return int(others[0]) if len(others) else len(block_ids)

    def add(self, block_ids: Sequence[int], generations: Sequence[int] | np.ndarray) -> None:
        """Add a reference to each block of a text."""
        ids = as_ids(block_ids)
        self._num_blocks += int(np.count_nonzero(self._counts[ids] == 0))
        self._counts[ids] += 1
        self._generation[ids] = generations

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return generations of blocks: [num_ids] int32."""
        generations: np.ndarray = self._generation[as_ids(block_ids)]
        return generations

    def end(self, block_ids: Sequence[int]) -> np.ndarray:
        """End a reference to each named block, and return generations.

        Raises KVError, and changes nothing, if a block is read less often than named.
        """
        ids, counts = np.unique(as_ids(block_ids), return_counts=True)
        if (self._counts[ids] < counts).any():
            raise KVError(f"of {len(block_ids)} blocks some are not read here so often")
        self._counts[ids] -= counts
        self._num_blocks -= int(np.count_nonzero(self._counts[ids] == 0))
        return self.generations(block_ids)


class HeldBlocks:
    """Leased blocks of a worker, at hand or in use, and sealed blocks read by the worker.

    In messages about a text, sealed blocks come first.
    """

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.references = References(shape.num_ids)  # to sealed blocks
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
        return (first - len(self.references), *others)

    @property
    def in_use(self) -> list[int]:
        """Leased blocks that are not at hand, and may be written."""
        in_use: list[int] = np.flatnonzero((self._generation != 0) & ~self._is_at_hand).tolist()
        return in_use

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return generations of blocks in use, sealed blocks first: [num_ids] int32."""
        generations: np.ndarray = self._generation[as_ids(block_ids)]
        if num_sealed := self.references.num_first(block_ids):
            generations[:num_sealed] = self.references.generations(block_ids[:num_sealed])
        return generations

    def adopt(self, block_ids: Sequence[int], generations: Sequence[int], num_sealed: int = 0) -> None:
        """Put blocks of the server or of another worker in use; the first `num_sealed` are sealed."""
        if num_sealed:
            self.references.add(block_ids[:num_sealed], generations[:num_sealed])
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
        generations, num_sealed = self.generations(block_ids), self.references.num_first(block_ids)
        self.end(block_ids[num_sealed:])
        if num_sealed:
            self.references.end(block_ids[:num_sealed])
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


def as_ids(block_ids: Sequence[int]) -> np.ndarray:
    """Return ids as an array: [num_ids] int32."""
    return np.asarray(block_ids, np.int32)
