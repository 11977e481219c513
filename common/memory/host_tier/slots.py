"""Slots of host memory and their blocks, found by key; the least recently used block is evicted first.

take:      a free slot, or an evicted block's slot, is being filled.
put:       the slot holds a block.
give_back: the slot is free, not filled.
hold:      the block is being read, so it is not evicted.
let_go:    the block is not read any more.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from common.memory.blocks.cached import CachedBlocks
from common.wire.values.block_key import KEY


class HostSlots:
    """At most `most` slots."""

    def __init__(self, most: int) -> None:
        self.is_growing = False  # more slots are coming, so nothing is evicted
        self.slot_of: dict[bytes, int] = {}  # by key, being read or not
        self.num_slots = 0
        self._key = np.zeros(most, KEY)  # by slot
        self._unread = CachedBlocks(most)  # evictable slots, in order of use
        self.free: list[int] = []  # taken from the end
        self.on_gone: Callable[[np.ndarray], None] | None = None  # called with evicted keys

    def __len__(self) -> int:
        """Return the number of blocks in slots."""
        return len(self.slot_of)

    def grow(self, num_slots: int) -> None:
        """Add free slots."""
        self.free[:0] = range(self.num_slots + num_slots - 1, self.num_slots - 1, -1)
        self.num_slots += num_slots

    def find(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return slots of the leading keys: [num_found] intp."""
        slots = takewhile(lambda slot: slot is not None, map(self.slot_of.get, keys))
        return np.array(list(slots), np.intp)

    def take(self, count: int) -> np.ndarray:
        """Take up to `count` slots to fill, free slots first, then those of the oldest blocks not being read.

        Nothing is evicted while the room grows, because a text without room yet would evict its own beginning.

        Returns [num_taken] intp, neighbours beside each other where possible.
        """
        taken = self.free[: -count - 1 : -1]
        del self.free[len(self.free) - len(taken) :]
        num_evicted = min(count - len(taken), len(self._unread))
        if not num_evicted or self.is_growing:
            return np.array(taken, np.intp)
        evicted = self._unread.evict(num_evicted)
        keys = self._key[evicted]
        for key in keys.tolist():
            del self.slot_of[key]
        if self.on_gone is not None:
            self.on_gone(keys)
        return np.concatenate([np.array(taken, np.intp), np.sort(evicted)])

    def put(self, slots: np.ndarray, keys: Sequence[bytes]) -> None:
        """Store blocks in filled slots; a slot is freed if another has its key."""
        first_of_key = list(map(self.slot_of.setdefault, keys, slots.tolist()))
        are_first = np.array(first_of_key, np.intp) == slots
        self._key[slots] = np.frombuffer(b"".join(keys), KEY)
        self._unread.add(slots[are_first][::-1])  # the end of a text is evicted first
        self.give_back(slots[~are_first])

    def give_back(self, slots: np.ndarray) -> None:
        """Free slots that were not filled."""
        self.free += slots.tolist()

    def hold(self, slots: np.ndarray) -> None:
        """Protect slots from eviction, because their blocks are being read."""
        self._unread.remove(slots)

    def let_go(self, slots: np.ndarray) -> None:
        """Make slots evictable again, as the most recently used."""
        self._unread.add(slots)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the blocks of keys the most recently used, in order."""
        slots = np.array([slot for slot in map(self.slot_of.get, keys) if slot is not None], np.intp)
        slots = slots[self._unread.have(slots)]
        self._unread.remove(slots)
        self._unread.add(slots)

    def unread_between(self, begin: int, end: int) -> np.ndarray:
        """Return keys in slots [begin, end) that are not being read: [num_unread] KEY."""
        keys: np.ndarray = self._key[begin:end][self._unread.have(np.arange(begin, end))]
        return keys

    def clear(self) -> None:
        """Forget all blocks, and free all slots."""
        self.slot_of.clear()
        self._unread = CachedBlocks(len(self._key))
        self.free = list(range(self.num_slots - 1, -1, -1))
