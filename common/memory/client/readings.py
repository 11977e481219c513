"""Blocks of a pool that a worker reads, and nobody writes: how often, as several of its texts may begin alike."""

from collections.abc import Iterator, Sequence

import numpy as np

from common.base.errors import KVError


class Readings:
    """As the memory server counts them, too: by block, of which a pool has `num_ids`."""

    def __init__(self, num_ids: int) -> None:
        self._num_readings = np.zeros(num_ids, np.int32)
        self._generation = np.zeros(num_ids, np.int32)
        self._num_blocks = 0

    def __len__(self) -> int:
        """Blocks, however often they are read."""
        return self._num_blocks

    def __contains__(self, block_id: int) -> bool:
        return bool(self._num_readings[block_id])

    def __iter__(self) -> Iterator[int]:
        """Each block as often as it is read."""
        ids = np.flatnonzero(self._num_readings)
        return iter(np.repeat(ids, self._num_readings[ids]).tolist())

    def num_first(self, block_ids: Sequence[int]) -> int:
        """How many from the first on are among them: of a text those come first."""
        if not len(block_ids) or not self._num_readings[block_ids[0]]:
            return 0
        others = np.flatnonzero(self._num_readings[_ids(block_ids)] == 0)
        return int(others[0]) if len(others) else len(block_ids)

    def add(self, block_ids: Sequence[int], generations: Sequence[int] | np.ndarray) -> None:
        """Each of a text's blocks is read once more."""
        ids = _ids(block_ids)
        self._num_blocks += int(np.count_nonzero(self._num_readings[ids] == 0))
        self._num_readings[ids] += 1
        self._generation[ids] = generations

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """By which the server knows them: [num_ids] int32."""
        generations: np.ndarray = self._generation[_ids(block_ids)]
        return generations

    def take(self, block_ids: Sequence[int]) -> np.ndarray:
        """Each is read once less; their generations. Raises KVError, and changes nothing, if one is not so often."""
        ids, num_readings = np.unique(_ids(block_ids), return_counts=True)
        if (self._num_readings[ids] < num_readings).any():
            raise KVError(f"of {len(block_ids)} blocks some are not read here so often")
        self._num_readings[ids] -= num_readings
        self._num_blocks -= int(np.count_nonzero(self._num_readings[ids] == 0))
        return self.generations(block_ids)


def _ids(block_ids: Sequence[int]) -> np.ndarray:
    return np.asarray(block_ids, np.int32)
