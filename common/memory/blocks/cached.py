"""Blocks that nobody reads, in the order in which they were let go: who has been there for longest goes first.

A log of them, in which those that are read again stay until the log's beginning gets there: so however many come, go or
are evicted, they do so in a few copies, not one by one.
"""

import numpy as np

NOWHERE = -1
SPARE = 64
"""Entries of the log that are looked at beyond those that are lacking, as blocks of some are read again."""


class CachedBlocks:
    """Of a pool of `num_ids` blocks."""

    def __init__(self, num_ids: int) -> None:
        self._log = np.zeros(2 * num_ids, np.intp)  # block ids
        self._begin, self._end = 0, 0  # of what is in use of it
        self._place = np.full(num_ids, NOWHERE, np.intp)  # by block: where in the log it is
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def block_ids(self) -> np.ndarray:
        """In their order: [num_blocks] intp."""
        block_ids: np.ndarray = self._log[self._begin : self._end][self._are_there(self._begin, self._end)]
        return block_ids

    def have(self, block_ids: np.ndarray) -> np.ndarray:
        """Whether each is there: [num_blocks] bool."""
        are_there: np.ndarray = self._place[block_ids] != NOWHERE
        return are_there

    def add(self, block_ids: np.ndarray) -> None:
        """These, which are not there yet, are last from now on: [num_added] intp, each once."""
        if self._end + len(block_ids) > len(self._log):
            self._tidy()
        begin, self._end = self._end, self._end + len(block_ids)
        self._log[begin : self._end] = block_ids
        self._place[block_ids] = np.arange(begin, self._end)
        self._num_blocks += len(block_ids)

    def remove(self, block_ids: np.ndarray) -> None:
        """These, which are there, are read again: [num_removed] intp, each once."""
        self._place[block_ids] = NOWHERE
        self._num_blocks -= len(block_ids)

    def evict(self, count: int) -> np.ndarray:
        """The first, so many, of which there must be as many, and one at least: [count] intp."""
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
        """Of entries of the log, whether their blocks are where these say: [end - begin] bool."""
        are_there: np.ndarray = self._place[self._log[begin:end]] == np.arange(begin, end)
        return are_there

    def _tidy(self) -> None:
        """Half of the log is in use at most, from its beginning on."""
        block_ids = self.block_ids
        self._begin, self._end = 0, len(block_ids)
        self._log[: self._end] = block_ids
        self._place[block_ids] = np.arange(self._end)
