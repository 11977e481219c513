"""Sealed blocks read by a worker, counted, because several of its texts may begin alike."""

from collections.abc import Iterator, Sequence

import numpy as np

from common.base.errors import KVError


class Readings:
    """Number of readings by block, of a pool with `num_ids`; the memory server counts alike."""

    def __init__(self, num_ids: int) -> None:
        self._num_readings = np.zeros(num_ids, np.int32)
        self._generation = np.zeros(num_ids, np.int32)
        self._num_blocks = 0

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return self._num_blocks

    def __contains__(self, block_id: int) -> bool:
        return bool(self._num_readings[block_id])

    def __iter__(self) -> Iterator[int]:
        """Yield each block as often as read."""
        ids = np.flatnonzero(self._num_readings)
        return iter(np.repeat(ids, self._num_readings[ids]).tolist())

    def num_first(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks are read here; sealed blocks come first in a text."""
        if not len(block_ids) or not self._num_readings[block_ids[0]]:
            return 0
        others = np.flatnonzero(self._num_readings[as_ids(block_ids)] == 0)
        return int(others[0]) if len(others) else len(block_ids)

    def add(self, block_ids: Sequence[int], generations: Sequence[int] | np.ndarray) -> None:
        """Count a reading of each block of a text."""
        ids = as_ids(block_ids)
        self._num_blocks += int(np.count_nonzero(self._num_readings[ids] == 0))
        self._num_readings[ids] += 1
        self._generation[ids] = generations

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return generations of blocks: [num_ids] int32."""
        generations: np.ndarray = self._generation[as_ids(block_ids)]
        return generations

    def take(self, block_ids: Sequence[int]) -> np.ndarray:
        """End a reading of each named block, and return generations.

        Raises KVError, and changes nothing, if a block is read less often than named.
        """
        ids, num_readings = np.unique(as_ids(block_ids), return_counts=True)
        if (self._num_readings[ids] < num_readings).any():
            raise KVError(f"of {len(block_ids)} blocks some are not read here so often")
        self._num_readings[ids] -= num_readings
        self._num_blocks -= int(np.count_nonzero(self._num_readings[ids] == 0))
        return self.generations(block_ids)


def as_ids(block_ids: Sequence[int]) -> np.ndarray:
    """Return ids as an array: [num_ids] int32."""
    return np.asarray(block_ids, np.int32)
