"""Background copies of sealed blocks to host memory.

    add:   a sealed block's key is queued.
    begin: a copy to a slot begins.
    look:  after the copy, the slot holds the block if its key still finds the same lease; else the slot is free.

Blocks are not locked for a copy. A block is immutable while its key finds it, so a copy counts if the key finds the
block with its old generation afterwards.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.memory.devices.backing import Copy
from common.memory.host_tier.slots import HostSlots
from common.memory.host_tier.traffic import MAX_AHEAD, Traffic

MAX_LOOKS = 256
"""Queued keys examined in a turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Departure:
    """A copy of some blocks, with their generations at its begin."""

    copy: Copy
    keys: list[bytes]
    block_ids: np.ndarray  # [num_blocks] intp
    generations: np.ndarray  # [num_blocks] int32
    slots: np.ndarray  # [num_blocks] intp


class Departures:
    """Copies to host memory from a pool."""

    def __init__(self, traffic: Traffic, slots: HostSlots) -> None:
        self.traffic, self.slots, self.index = traffic, slots, traffic.pool.index
        # Keys. A full queue drops the oldest, because their blocks are probably evicted.
        self.queue: deque[bytes] = deque(maxlen=self.index.shape.num_ids)
        self.leaving: deque[Departure] = deque()

    def add(self, keys: Iterable[bytes]) -> None:
        """Queue keys of blocks to copy; blocks evicted meanwhile are skipped."""
        self.queue += keys

    def look(self) -> None:
        """Put finished copies into their slots; raises CopyFailed."""
        while self.leaving and self.traffic.is_over(self.leaving[0].copy, len(self.leaving[0].keys), is_out=True):
            departure = self.leaving.popleft()
            block_ids = np.array([self.index.sealed.block_of.get(key, -1) for key in departure.keys], np.intp)
            generations = self.index.leases.generation[departure.block_ids]
            are_same = (block_ids == departure.block_ids) & (generations == departure.generations)
            kept = np.flatnonzero(are_same)
            self.slots.put(departure.slots[kept], [departure.keys[number] for number in kept.tolist()])
            self.slots.give_back(departure.slots[~are_same])

    def begin(self) -> None:
        """Begin copies of queued blocks while slots are free; raises CopyFailed."""
        if not self.slots.num_slots:
            return
        for _ in range(MAX_AHEAD - len(self.leaving)):
            keys, block_ids = self._next()
            slots = self.slots.take(len(keys)) if keys else block_ids
            self.queue.extendleft(reversed(keys[len(slots) :]))
            if not len(slots):
                return
            block_ids = block_ids[: len(slots)]
            copy = self.traffic.begin(block_ids, slots, is_out=True)
            generations = self.index.leases.generation[block_ids]
            self.leaving.append(Departure(copy, keys[: len(slots)], block_ids, generations, slots))

    def give_up(self) -> None:
        """Void all copies and empty the queue."""
        for departure in self.leaving:
            self.slots.give_back(departure.slots)
        self.leaving.clear()
        self.queue.clear()

    def _next(self) -> tuple[list[bytes], np.ndarray]:
        """Take queued keys in the pool and not in host memory, with their blocks: [num_keys] intp."""
        keys: list[bytes] = []
        block_ids: list[int] = []
        for _ in range(min(MAX_LOOKS, len(self.queue))):
            key = self.queue.popleft()
            block_id = self.index.sealed.block_of.get(key)
            if block_id is not None and key not in self.slots.slot_of:
                keys.append(key)
                block_ids.append(block_id)
            if len(keys) == self.traffic.batch:
                break
        return keys, np.array(block_ids, np.intp)
