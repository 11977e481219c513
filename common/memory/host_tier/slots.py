"""Which blocks host memory holds: found by their keys, each in a slot; who was used longest ago goes first.

free ──take──▶ being filled ──put──▶ there ──hold──▶ being read ──let_go──▶ there
                 └─────give_back─────▶ free            there ──take──▶ being filled
"""

from collections.abc import Callable, Sequence

import numpy as np

from common.memory.blocks.cached import CachedBlocks
from common.memory.blocks.sealed import KEY


class HostSlots:
    """Of which there will be `most`."""

    def __init__(self, most: int) -> None:
        self.is_growing = False  # soon there are more: nothing has to go yet
        self.slot_of: dict[bytes, int] = {}  # of what is there, read or not
        self.num_slots = 0
        self._key = np.zeros(most, KEY)  # by slot, of what is there
        self._unread = CachedBlocks(most)  # slots of what is there and not being read, in their order
        self.free: list[int] = []  # the last goes first
        self.on_gone: Callable[[np.ndarray], None] | None = None  # told of keys of which nothing is there any more

    def __len__(self) -> int:
        """Blocks that are there."""
        return len(self.slot_of)

    @property
    def num_unread(self) -> int:
        """Of those, how many are not being read."""
        return len(self._unread)

    def grow(self, num_slots: int) -> None:
        """So many more may be used."""
        self.free[:0] = range(self.num_slots + num_slots - 1, self.num_slots - 1, -1)
        self.num_slots += num_slots

    def find(self, keys: Sequence[bytes]) -> np.ndarray:
        """Slots of the first of these keys, as far as they are there: [num_found] intp."""
        found = []
        for slot in map(self.slot_of.get, keys):
            if slot is None:
                break
            found.append(slot)
        return np.array(found, np.intp)

    def take(self, count: int) -> np.ndarray:
        """Slots to be filled, so many or fewer if the others are in use; what was there longest is there no more.

        As long as there are more and more of them that stays, or a text that has no room yet would drive out its own
        beginning.

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
        """These are filled; of what is there already one is enough."""
        first_of_key = list(map(self.slot_of.setdefault, keys, slots.tolist()))
        are_first = np.array(first_of_key, np.intp) == slots
        self._key[slots] = np.frombuffer(b"".join(keys), KEY)
        self._unread.add(slots[are_first][::-1])  # of one text the end goes first
        self.give_back(slots[~are_first])

    def give_back(self, slots: np.ndarray) -> None:
        """These were not filled after all."""
        self.free += slots.tolist()

    def hold(self, slots: np.ndarray) -> None:
        """These, which are there and not being read, are read: nobody fills them."""
        self._unread.remove(slots)

    def let_go(self, slots: np.ndarray) -> None:
        """These are not read any more, and go last."""
        self._unread.add(slots)

    def touch(self, keys: Sequence[bytes]) -> None:
        """What is there of these goes last, in that order."""
        slots = np.array([slot for slot in map(self.slot_of.get, keys) if slot is not None], np.intp)
        slots = slots[self._unread.have(slots)]
        self._unread.remove(slots)
        self._unread.add(slots)

    def unread_between(self, begin: int, end: int) -> np.ndarray:
        """Of slots with numbers from one to another, what is there and not being read: [num_unread] KEY."""
        keys: np.ndarray = self._key[begin:end][self._unread.have(np.arange(begin, end))]
        return keys

    def clear(self) -> None:
        """Nothing is there any more, or being filled or read."""
        self.slot_of.clear()
        self._unread = CachedBlocks(len(self._key))
        self.free = list(range(self.num_slots - 1, -1, -1))
