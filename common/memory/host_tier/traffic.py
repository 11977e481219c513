"""Copies between blocks of a pool and slots of host memory: runs, durations, totals."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from common.memory.base.slot_sizes import block_sizes, slot_bytes
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
        self.slot_us = 0.0  # mean time to copy a slot; 0 if unknown
        self._num_begun = 0  # copies that are not over
        self._moved_s = 0.0  # last progress: the first begin, or the end of a copy

    def serve(self, pool: Pool, num_in_piece: int) -> None:
        """Copy for a pool from now on; `num_in_piece` slots fit into a piece of host memory."""
        self.pool, self._num_in_piece, self._num_begun = pool, num_in_piece, 0
        self.slot_bytes = slot_bytes(pool.layout)
        self.most_slots = self.copies.batch_bytes // self.slot_bytes  # of a copy of several blocks
        self._sizes = block_sizes(pool.layout)
        self.slot_us = 0.0

    def sizes(self, block_ids: Sequence[int]) -> list[int]:
        """Return the slots taken by each block."""
        if len(self._sizes) == 1:
            return self._sizes * len(block_ids)
        return [self._sizes[self.pool.index.shape.group_of(block_id)] for block_id in block_ids]

    def num_at_once(self, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks make a copy, at least one."""
        return max(1, sum(end <= self.most_slots for end in accumulate(self.sizes(block_ids[:MAX_BATCH]))))

    def begin(self, block_ids: np.ndarray, slots: Sequence[list[int]], *, is_out: bool) -> Copy:
        """Begin to copy blocks, [num_blocks] intp, from or to the slots of each; raises CopyFailed."""
        copy = self.copies.begin(self.pool.memory, self._runs(block_ids.tolist(), slots), is_out=is_out)
        if not self._num_begun:
            self._moved_s = self._clock()
        self._num_begun += 1
        return copy

    def is_over(self, copy: Copy, block_ids: np.ndarray, *, is_out: bool) -> bool:
        """Tell whether a copy of blocks, [num_blocks] intp, is over; ask until true, and then no more.

        Raises CopyFailed, also if no copy ended for `STALL_S`.
        """
        took_s = copy.took_s()
        if took_s is None:
            if self._clock() - self._moved_s > STALL_S:
                raise CopyFailed(f"a copy is not over after {STALL_S:.0f} s")
            return False
        self._num_begun -= 1
        self._moved_s = self._clock()
        places = [self.pool.index.shape.place(block_id) for block_id in block_ids.tolist()]
        slot_us = took_s / sum(self.sizes(block_ids.tolist())) * 1e6
        self.slot_us += (slot_us - self.slot_us) * (WEIGHT if self.slot_us else 1.0)
        num_bytes = sum(place.num_bytes for place in places)
        if is_out:
            self.out_bytes += num_bytes
        else:
            self.num_restored += len(places)
            self.in_bytes += num_bytes
        return True

    def _runs(self, block_ids: list[int], slots: Sequence[list[int]]) -> list[Run]:
        """Return runs of bytes that are neighbours on both sides."""
        runs: list[Run] = []
        next_offset = next_slot = -1
        for block_id, of_block in zip(block_ids, slots, strict=True):
            offset, num_left = self.pool.index.shape.place(block_id)
            for slot in of_block:
                number, index = divmod(slot, self._num_in_piece)
                num_bytes = min(num_left, self.slot_bytes)
                if (offset, slot) == (next_offset, next_slot) and index:
                    runs[-1] = runs[-1]._replace(num_bytes=runs[-1].num_bytes + num_bytes)
                else:
                    runs.append(Run(offset, self._pieces[number], index * self.slot_bytes, num_bytes))
                offset, num_left = offset + num_bytes, num_left - num_bytes
                next_offset, next_slot = offset, (slot + 1 if num_bytes == self.slot_bytes else -1)
        return runs
