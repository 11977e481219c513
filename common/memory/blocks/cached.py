"""Cached blocks, without readers, in order of release: the longest cached block is evicted first.

The order is a log. After a block is read again, the old entry stays until the log's beginning passes the entry. So many
blocks are added, removed or evicted with a few array copies.
"""

import numpy as np

NOWHERE = -1
SPARE = 64
"""Extra log entries scanned by an eviction, because some blocks are read again."""


class CachedBlocks:
    """Cached blocks of a pool with ids below `num_ids`."""

    def __init__(self, num_ids: int) -> None:
        self._log = np.zeros(2 * num_ids, np.intp)  # block ids
        self._begin, self._end = 0, 0  # live part of the log
        self._place = np.full(num_ids, NOWHERE, np.intp)  # by block: index in the log
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def block_ids(self) -> np.ndarray:
        """Cached blocks, longest cached first: [num_blocks] intp."""
        block_ids: np.ndarray = self._log[self._begin : self._end][self._are_there(self._begin, self._end)]
        return block_ids

    def oldest(self, count: int) -> np.ndarray:
        """Return the `count` longest cached blocks, or all if there are fewer: [num_blocks] intp."""
        length = count + SPARE
        while True:
            end = min(self._begin + length, self._end)
            block_ids: np.ndarray = self._log[self._begin : end][self._are_there(self._begin, end)][:count]
            if len(block_ids) == count or end == self._end:
                return block_ids
            length *= 2

    def have(self, block_ids: np.ndarray) -> np.ndarray:
        """Tell for each block whether it is cached: [num_blocks] bool."""
        are_there: np.ndarray = self._place[block_ids] != NOWHERE
        return are_there

    def add(self, block_ids: np.ndarray) -> None:
        """Append blocks that are not cached yet: [num_added] intp, each once."""
        if self._end + len(block_ids) > len(self._log):
            self._tidy()
        begin, self._end = self._end, self._end + len(block_ids)
        self._log[begin : self._end] = block_ids
        self._place[block_ids] = np.arange(begin, self._end)
        self._num_blocks += len(block_ids)

    def remove(self, block_ids: np.ndarray) -> None:
        """Remove cached blocks, because they are read again: [num_removed] intp, each once."""
        self._place[block_ids] = NOWHERE
        self._num_blocks -= len(block_ids)

    def evict(self, count: int) -> np.ndarray:
        """Remove and return the `count` longest cached blocks: [count] intp.

        There must be so many, and `count` must be at least 1.
        """
        assert 0 < count <= len(self), "who evicts some looks first"
        evicted, num_lacking, length = [], count, count + SPARE
        while num_lacking:
            end = min(self._begin + length, self._end)
            offsets = np.flatnonzero(self._are_there(self._begin, end))[:num_lacking]
            evicted.append(self._log[self._begin + offsets])
            num_lacking -= len(offsets)
            self._begin, length = (end if num_lacking else self._begin + int(offsets[-1]) + 1), 2 * length
        block_ids = np.concatenate(evicted)
        self.remove(block_ids)
        return block_ids

    def _are_there(self, begin: int, end: int) -> np.ndarray:
        """Tell for each log entry whether the entry is live: [end - begin] bool."""
        are_there: np.ndarray = self._place[self._log[begin:end]] == np.arange(begin, end)
        return are_there

    def _tidy(self) -> None:
        """Move live entries to the front; afterwards at most half of the log is in use."""
        block_ids = self.block_ids
        self._begin, self._end = 0, len(block_ids)
        self._log[: self._end] = block_ids
        self._place[block_ids] = np.arange(self._end)
