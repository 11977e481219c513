"""Spills: copies of sealed blocks to host memory, in the background.

    add:    a sealed block's key is queued.
    begin:  a copy to a slot begins.
    finish: after the copy, the slot holds the block if its key still finds the same lease; else the slot is free.

Blocks are not locked for a copy. A block is immutable while its key finds it, so a copy counts if the key finds the
block with its old generation afterwards.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

import numpy as np

from common.memory.devices.backing import Copy
from common.memory.host_tier.slots import HostSlots
from common.memory.host_tier.traffic import MAX_AHEAD, MAX_BATCH, Traffic

MAX_EXAMINED = 256
"""Queued keys examined in a turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Spill:
    """A copy of some blocks, with their generations at its begin."""

    copy: Copy
    keys: list[bytes]
    block_ids: np.ndarray  # [num_blocks] intp
    generations: np.ndarray  # [num_blocks] int32
    slots: list[list[int]]  # of each block


class Spills:
    """Copies to host memory from a pool."""

    def __init__(self, traffic: Traffic, slots: HostSlots) -> None:
        self.traffic, self.slots, self.index = traffic, slots, traffic.pool.index
        # Keys. A full queue drops the oldest, because their blocks are probably evicted.
        self.queue: deque[bytes] = deque(maxlen=self.index.shape.num_ids)
        self.under_way: deque[Spill] = deque()

    def add(self, keys: Iterable[bytes]) -> None:
        """Queue keys of blocks to copy; blocks evicted meanwhile are skipped."""
        self.queue += keys

    def finish(self) -> None:
        """Put finished copies into their slots; raises CopyFailed."""
        while self.under_way and self.traffic.is_over(self.under_way[0].copy, self.under_way[0].block_ids, is_out=True):
            spill = self.under_way.popleft()
            block_ids = np.array([self.index.sealed.block_of.get(key, -1) for key in spill.keys], np.intp)
            generations = self.index.leases.generation[spill.block_ids]
            are_same = (block_ids == spill.block_ids) & (generations == spill.generations)
            kept = are_same.tolist()
            self.slots.put(list(compress(spill.slots, kept)), list(compress(spill.keys, kept)))
            self.slots.give_back(slots for slots, is_kept in zip(spill.slots, kept, strict=True) if not is_kept)

    def begin(self) -> None:
        """Begin copies of queued blocks while slots are free; raises CopyFailed."""
        if not self.slots.num_slots:
            return
        for _ in range(MAX_AHEAD - len(self.under_way)):
            keys, block_ids = self._next()
            slots = self.slots.take(self.traffic.sizes(block_ids.tolist()))
            self.queue.extendleft(reversed(keys[len(slots) :]))
            if not slots:
                return
            block_ids = block_ids[: len(slots)]
            copy = self.traffic.begin(block_ids, slots, is_out=True)
            generations = self.index.leases.generation[block_ids]
            self.under_way.append(Spill(copy, keys[: len(slots)], block_ids, generations, slots))

    def cancel(self) -> None:
        """Void all copies and empty the queue."""
        for spill in self.under_way:
            self.slots.give_back(spill.slots)
        self.under_way.clear()
        self.queue.clear()

    def _next(self) -> tuple[list[bytes], np.ndarray]:
        """Take queued keys in the pool and not in host memory, with their blocks: [num_keys] intp.

        A block larger than all host memory is left out.
        """
        keys: list[bytes] = []
        block_ids: list[int] = []
        num_slots = 0
        for _ in range(min(MAX_EXAMINED, len(self.queue))):
            key = self.queue.popleft()
            block_id = self.index.sealed.block_of.get(key)
            if block_id is None or key in self.slots.slot_of:
                continue
            [size] = self.traffic.sizes([block_id])
            if size > self.slots.most:
                continue
            num_slots += size
            if keys and (num_slots > self.traffic.most_slots or len(keys) == MAX_BATCH):
                self.queue.appendleft(key)
                break
            keys.append(key)
            block_ids.append(block_id)
        return keys, np.array(block_ids, np.intp)
