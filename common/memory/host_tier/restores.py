"""Blocks on their way back from host memory, as somebody wants what the pool has no more.

    asked ──▶ leased by the tier ──copied──▶ sealed, and what waited for them is asked again

Nobody else has the blocks before the copies are over. What the text begins with is read as long, so that all of it is
there in the end, and who wants the same waits for the same copies.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.memory.blocks.index import TIER
from common.memory.blocks.pool import Want
from common.memory.devices.backing import Copy
from common.memory.host_tier.slots import HostSlots
from common.memory.host_tier.traffic import MAX_AHEAD, Traffic


@dataclass(slots=True, eq=False)
class Restore:
    """Of one text."""

    keys: list[bytes]
    slots: np.ndarray  # [num_blocks] intp, as are `block_ids`
    block_ids: np.ndarray  # which are the tier's, to be written
    before: np.ndarray  # what the text begins with, which the tier reads: [num_before] intp
    wants: list[Want] = field(default_factory=list)  # that wait for it
    num_begun: int = 0
    num_over: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_over == len(self.keys)


class Restores:
    """Of one pool."""

    def __init__(self, traffic: Traffic, slots: HostSlots) -> None:
        self.traffic, self.slots, self.index = traffic, slots, traffic.pool.index
        self.going_on: deque[Restore] = deque()  # oldest first
        self.of_key: dict[bytes, Restore] = {}
        self.coming: deque[tuple[Copy, Restore, int]] = deque()  # copies, each of so many blocks

    def add(self, keys: Sequence[bytes], slots: np.ndarray, before: np.ndarray, want: Want) -> None:
        """What is in these slots is wanted, behind blocks that the tier reads."""
        block_ids = self.index.lease(TIER, (len(slots),))
        restore = Restore(list(keys[: len(slots)]), slots, block_ids, before, [want])
        self.slots.hold(slots)
        self.of_key.update(dict.fromkeys(restore.keys, restore))
        self.going_on.append(restore)

    def look(self) -> Iterator[Restore]:
        """Those that are over: their keys find them, and the tier still reads them; raises CopyFailed."""
        while self.coming and self.traffic.is_over(self.coming[0][0], self.coming[0][2], is_out=False):
            _, restore, num_blocks = self.coming.popleft()
            restore.num_over += num_blocks
            if restore.is_over:
                self._end(restore)
                yield restore

    def begin(self) -> None:
        """Copy what is wanted; raises CopyFailed."""
        for restore in self.going_on:
            while restore.num_begun < len(restore.keys) and len(self.coming) < MAX_AHEAD:
                some = slice(restore.num_begun, restore.num_begun + self.traffic.batch)
                block_ids = restore.block_ids[some]
                copy = self.traffic.begin(block_ids, restore.slots[some], is_out=False)
                restore.num_begun += len(block_ids)
                self.coming.append((copy, restore, len(block_ids)))

    def give_up(self) -> list[Restore]:
        """None of them ends; returns them. Their blocks, which may still be written, stay the tier's."""
        restores = list(self.going_on)
        for restore in restores:
            self._forget(restore)
        self.coming.clear()
        return restores

    def _end(self, restore: Restore) -> None:
        generations = self.index.generations(restore.block_ids)
        self.index.seal(TIER, restore.block_ids, generations, b"".join(restore.keys))
        self._forget(restore)

    def _forget(self, restore: Restore) -> None:
        self.going_on.remove(restore)
        for key in restore.keys:
            del self.of_key[key]
        self.slots.let_go(restore.slots[::-1])  # of one text the end goes first
