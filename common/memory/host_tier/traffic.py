"""Copies between blocks of a pool and slots of host memory: runs, durations, totals."""

import time
from collections.abc import Callable

import numpy as np

from common.memory.blocks.pool import Pool
from common.memory.devices.backing import Copies, Copy, CopyFailed, HostPiece, Run

MAX_BATCH = 64
"""Blocks of a copy."""
MAX_AHEAD = 2
"""Copies begun in a direction: one under way, one queued."""
WEIGHT = 0.1
"""Weight of the last copy in the mean duration."""
STALL_S = 10.0
"""Longest time without the end of a begun copy."""


class Traffic:
    """Copies of a pool at a time; totals are since the start.

    Args:
        pieces: of host memory, as far as made; grows.
    """

    def __init__(self, copies: Copies, pieces: list[HostPiece], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.copies, self._pieces, self._clock = copies, pieces, clock
        self.num_restored = self.out_bytes = self.in_bytes = 0
        self.block_us = 0.0  # mean time to copy a block; 0 if unknown
        self._num_begun = 0  # copies that are not over
        self._moved_s = 0.0  # last progress: the first begin, or the end of a copy

    def serve(self, pool: Pool, num_in_piece: int) -> None:
        """Copy for a pool from now on; `num_in_piece` blocks fit into a piece of host memory."""
        self.pool, self._num_in_piece, self._num_begun = pool, num_in_piece, 0
        self.block_bytes = pool.layout.groups[0].block_bytes
        self.batch = max(1, min(MAX_BATCH, self.copies.batch_bytes // self.block_bytes))
        self.block_us = 0.0

    def begin(self, block_ids: np.ndarray, slots: np.ndarray, *, is_out: bool) -> Copy:
        """Begin to copy blocks, from or to slots: [num_blocks] intp both; raises CopyFailed."""
        copy = self.copies.begin(self.pool.memory, self._runs(block_ids.tolist(), slots.tolist()), is_out=is_out)
        if not self._num_begun:
            self._moved_s = self._clock()
        self._num_begun += 1
        return copy

    def is_over(self, copy: Copy, num_blocks: int, *, is_out: bool) -> bool:
        """Tell whether a copy is over; ask until true, and then no more.

        Raises CopyFailed, also if no copy ended for `STALL_S`.
        """
        took_s = copy.took_s()
        if took_s is None:
            if self._clock() - self._moved_s > STALL_S:
                raise CopyFailed(f"a copy is not over after {STALL_S:.0f} s")
            return False
        self._num_begun -= 1
        self._moved_s = self._clock()
        block_us = took_s / num_blocks * 1e6
        self.block_us += (block_us - self.block_us) * (WEIGHT if self.block_us else 1.0)
        if is_out:
            self.out_bytes += num_blocks * self.block_bytes
        else:
            self.num_restored += num_blocks
            self.in_bytes += num_blocks * self.block_bytes
        return True

    def _runs(self, block_ids: list[int], slots: list[int]) -> list[Run]:
        """Return runs of blocks that are neighbours on both sides."""
        runs: list[Run] = []
        next_block = next_slot = -1
        for block_id, slot in zip(block_ids, slots, strict=True):
            number, index = divmod(slot, self._num_in_piece)
            if (block_id, slot) == (next_block, next_slot) and index:
                runs[-1] = runs[-1]._replace(num_bytes=runs[-1].num_bytes + self.block_bytes)
            else:
                offset = self.pool.index.shape.place(block_id).offset
                runs.append(Run(offset, self._pieces[number], index * self.block_bytes, self.block_bytes))
            next_block, next_slot = block_id + 1, slot + 1
        return runs
