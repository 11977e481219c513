"""Slots of host memory and their blocks, found by key; the least recently used block is evicted first.

take:      free slots, or evicted blocks' slots, are being filled.
put:       the slots hold blocks.
give_back: the slots are free, not filled.
hold:      a block is being read, so it is not evicted.
let_go:    the block is not read any more.

A block takes as many slots as its bytes need, anywhere, and is named by its first slot.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, compress, takewhile

import numpy as np

from common.memory.blocks.cached import CachedBlocks
from common.wire.values.block_key import KEY


class HostSlots:
    """At most `most` slots; a block takes at most `largest`."""

    def __init__(self, most: int, largest: int = 1) -> None:
        self._most = most
        self.is_growing = False  # more slots are coming, so nothing is evicted
        self.slot_of: dict[bytes, int] = {}  # first slot by key, being read or not
        self._largest = largest
        self._others: dict[int, list[int]] = {}  # by first slot, if the block takes several
        self.num_slots = 0
        self._key = np.zeros(most, KEY)  # by first slot
        self._unread = CachedBlocks(most)  # first slots of evictable blocks, in order of use
        self._num_unread = 0  # slots of evictable blocks
        self.free: list[int] = []  # taken from the end
        self.on_gone: Callable[[np.ndarray], None] | None = None  # called with evicted keys

    def __len__(self) -> int:
        """Return the number of blocks in slots."""
        return len(self.slot_of)

    @property
    def most(self) -> int:
        """Return the slots of all host memory, as far as it is still to come."""
        return self._most if self.is_growing else self.num_slots

    def grow(self, num_slots: int) -> None:
        """Add free slots."""
        self.free[:0] = range(self.num_slots + num_slots - 1, self.num_slots - 1, -1)
        self.num_slots += num_slots

    def all_of(self, first: int) -> list[int]:
        """Return all slots of a block."""
        return [first, *self._others.get(first, ())]

    def take(self, sizes: Sequence[int]) -> list[list[int]]:
        """Take slots to fill for leading blocks of these sizes, as many as fit.

        Free slots go first, then those of the oldest blocks not being read. Nothing is evicted while the room grows,
        because a text without room yet would evict its own beginning. Nor is anything evicted for a block that does not
        fit then. Neighbours are beside each other where possible.
        """
        most = len(self.free) + (0 if self.is_growing else self._num_unread)
        fitting = list(takewhile(lambda end: end <= most, accumulate(sizes)))
        if fitting and fitting[-1] > len(self.free):
            self._evict(fitting[-1] - len(self.free))
        taken: list[list[int]] = []
        for size in sizes[: len(fitting)]:
            taken.append(self.free[: -size - 1 : -1])
            del self.free[len(self.free) - size :]
        return taken

    def put(self, slots: Sequence[list[int]], keys: Sequence[bytes]) -> None:
        """Store blocks in filled slots; slots are freed if others have their key."""
        firsts = [first for first, *_ in slots]
        are_new = [self.slot_of.setdefault(key, first) == first for key, first in zip(keys, firsts, strict=True)]
        self._key[firsts] = np.frombuffer(b"".join(keys), KEY)
        new = np.array(firsts, np.intp)[are_new]
        self._others.update((of_block[0], of_block[1:]) for of_block in compress(slots, are_new) if len(of_block) > 1)
        self.let_go(new[::-1])  # the end of a text is evicted first
        self.give_back([of_block for of_block, is_new in zip(slots, are_new, strict=True) if not is_new])

    def give_back(self, slots: Iterable[list[int]]) -> None:
        """Free slots that were not filled."""
        self.free += chain.from_iterable(slots)

    def hold(self, firsts: np.ndarray) -> None:
        """Protect blocks from eviction, because they are being read."""
        self._unread.remove(firsts)
        self._num_unread -= self._size_of(firsts)

    def let_go(self, firsts: np.ndarray) -> None:
        """Make blocks evictable, as the most recently used."""
        self._unread.add(firsts)
        self._num_unread += self._size_of(firsts)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the blocks of keys the most recently used, in order."""
        slots = np.array([slot for slot in map(self.slot_of.get, keys) if slot is not None], np.intp)
        slots = slots[self._unread.have(slots)]
        self._unread.remove(slots)
        self._unread.add(slots)

    def unread_between(self, begin: int, end: int) -> np.ndarray:
        """Return keys of blocks that begin in slots [begin, end) and are not being read: [num_unread] KEY."""
        keys: np.ndarray = self._key[begin:end][self._unread.have(np.arange(begin, end))]
        return keys

    def clear(self) -> None:
        """Forget all blocks, and free all slots."""
        self.slot_of.clear()
        self._others.clear()
        self._unread, self._num_unread = CachedBlocks(len(self._key)), 0
        self.free = list(range(self.num_slots - 1, -1, -1))

    def _size_of(self, firsts: np.ndarray) -> int:
        """Return the slots of blocks."""
        return len(firsts) + (sum(len(self._others.get(first, ())) for first in firsts.tolist()) if self._others else 0)

    def _evict(self, num_lacking: int) -> None:
        """Evict the oldest blocks until so many slots more are free; there must be so many."""
        evicted: list[int] = []
        gone: list[np.ndarray] = []
        while num_lacking > len(evicted):
            count = max(1, (num_lacking - len(evicted)) // self._largest)
            firsts = self._unread.evict(min(count, len(self._unread)))
            gone.append(self._key[firsts])
            evicted += firsts.tolist()
            if self._others:
                evicted += chain.from_iterable(self._others.pop(first, ()) for first in firsts.tolist())
        self._num_unread -= len(evicted)
        keys = np.concatenate(gone)
        for key in keys.tolist():
            del self.slot_of[key]
        if self.on_gone is not None:
            self.on_gone(keys)
        self.free[:0] = sorted(evicted, reverse=True)
