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

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self._counts = np.zeros(shape.num_ids, np.int32)
        self._generation = np.zeros(shape.num_ids, np.int32)
        self.num_blocks = [0] * len(shape.num_blocks)  # distinct blocks, by group

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return sum(self.num_blocks)

    def are_read(self, block_ids: Sequence[int]) -> np.ndarray:
        """Tell for each block whether it is read here, so sealed: [num_ids] bool."""
        are_read: np.ndarray = self._counts[as_ids(block_ids)] > 0
        return are_read

    def add(self, block_ids: Sequence[int] | np.ndarray, generations: Sequence[int] | np.ndarray) -> None:
        """Add a reference to each block of a text."""
        ids = as_ids(block_ids)
        self._count(ids[self._counts[ids] == 0], 1)
        self._counts[ids] += 1
        self._generation[ids] = generations

    def generations(self, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return generations of blocks: [num_ids] int32."""
        generations: np.ndarray = self._generation[as_ids(block_ids)]
        return generations

    def end(self, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """End a reference to each named block, and return generations.

        Raises KVError, and changes nothing, if a block is read less often than named.
        """
        ids, counts = np.unique(as_ids(block_ids), return_counts=True)
        if (self._counts[ids] < counts).any():
            raise KVError(f"of {len(block_ids)} blocks some are not read here so often")
        self._counts[ids] -= counts
        self._count(ids[self._counts[ids] == 0], -1)
        return self.generations(block_ids)

    def _count(self, ids: np.ndarray, sign: int) -> None:
        for number, count in enumerate(self.shape.count(ids.tolist())):
            self.num_blocks[number] += sign * count


class HeldBlocks:
    """Leased blocks of a worker, at hand or in use, and sealed blocks read by the worker."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.references = References(shape)  # to sealed blocks
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
        columns = zip(self.shape.capacity, self._num_leased, self._at_hand, self.references.num_blocks, strict=True)
        return tuple(capacity - leased + len(at_hand) - num_read for capacity, leased, at_hand, num_read in columns)

    @property
    def in_use(self) -> list[int]:
        """Leased blocks that are not at hand, and may be written."""
        in_use: list[int] = np.flatnonzero((self._generation != 0) & ~self._is_at_hand).tolist()
        return in_use

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return generations of blocks in use or read: [num_ids] int32."""
        of_sealed = self.references.generations(block_ids)
        return np.where(self.references.are_read(block_ids), of_sealed, self._generation[as_ids(block_ids)])

    def adopt(self, block_ids: Sequence[int], generations: Sequence[int], are_sealed: np.ndarray | None = None) -> None:
        """Put blocks of the server or of another worker in use, and read the sealed ones: [num_ids] bool, or none."""
        if are_sealed is not None and are_sealed.any():
            ids, of_all = as_ids(block_ids), as_ids(generations)
            self.references.add(ids[are_sealed], of_all[are_sealed])
            block_ids, generations = ids[~are_sealed].tolist(), of_all[~are_sealed].tolist()
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
        """Give blocks in use or read to another worker. Return generations: [num_ids] int32."""
        generations, are_read = self.generations(block_ids), self.references.are_read(block_ids)
        ids = as_ids(block_ids)
        self.end(ids[~are_read].tolist())
        if are_read.any():
            self.references.end(ids[are_read])
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


def as_ids(block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return ids as an array: [num_ids] int32."""
    return np.asarray(block_ids, np.int32)
