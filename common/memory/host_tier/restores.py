"""Copies of blocks back from host memory, for wants of blocks evicted from the pool.

    add:    blocks are leased by the tier, and wants wait.
    begin:  copies begin.
    finish: copied blocks are sealed, and the waiting wants are granted.

Blocks are not shared before their copies are over. The tier reads all other blocks of the text meanwhile, so the text
is whole in the end. Later wants of the text wait for the running copies.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.memory.blocks.index import TIER
from common.memory.blocks.pool import Want
from common.memory.devices.backing import Copy
from common.memory.host_tier.slots import HostSlots
from common.memory.host_tier.traffic import MAX_AHEAD, MAX_BATCH, Traffic
from common.wire.values.kv_layout import Counts


@dataclass(slots=True, eq=False)
class Restore:
    """A restore of the missing blocks of a text, group after group."""

    keys: list[bytes]
    slots: np.ndarray  # first slot of each block: [num_blocks] intp
    block_ids: np.ndarray  # leased by the tier: [num_blocks] intp
    others: np.ndarray  # blocks of the text in the pool, read by the tier: [num_others] intp
    wants: list[Want] = field(default_factory=list)  # waiting for the restore
    num_begun: int = 0
    num_over: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_over == len(self.keys)


class Restores:
    """Restores into a pool."""

    def __init__(self, traffic: Traffic, slots: HostSlots) -> None:
        self.traffic, self.slots, self.index = traffic, slots, traffic.pool.index
        self.restores: deque[Restore] = deque()  # oldest first
        self.of_key: dict[bytes, Restore] = {}
        self.under_way: deque[tuple[Copy, Restore, np.ndarray]] = deque()  # copies and their blocks

    def add(self, keys: Sequence[bytes], counts: Counts, others: np.ndarray, want: Want) -> None:
        """Begin to restore blocks, so many of each group, beside `others` read by the tier: [num_others] intp."""
        slots = np.array([self.slots.slot_of[key] for key in keys], np.intp)
        restore = Restore(list(keys), slots, self.index.lease(TIER, counts), others, [want])
        self.slots.hold(slots)
        self.of_key.update(dict.fromkeys(restore.keys, restore))
        self.restores.append(restore)

    def finish(self) -> Iterator[Restore]:
        """Yield finished restores; their keys find the blocks, and the tier still reads them. Raises CopyFailed."""
        while self.under_way and self.traffic.is_over(self.under_way[0][0], self.under_way[0][2], is_out=False):
            _, restore, block_ids = self.under_way.popleft()
            restore.num_over += len(block_ids)
            if restore.is_over:
                self._end(restore)
                yield restore

    def begin(self) -> None:
        """Begin copies, oldest restore first; raises CopyFailed."""
        for restore in self.restores:
            while restore.num_begun < len(restore.keys) and len(self.under_way) < MAX_AHEAD:
                rest = restore.block_ids[restore.num_begun : restore.num_begun + MAX_BATCH]
                block_ids = rest[: self.traffic.num_at_once(rest.tolist())]
                firsts = restore.slots[restore.num_begun : restore.num_begun + len(block_ids)]
                copy = self.traffic.begin(block_ids, list(map(self.slots.all_of, firsts.tolist())), is_out=False)
                restore.num_begun += len(block_ids)
                self.under_way.append((copy, restore, block_ids))

    def cancel(self) -> list[Restore]:
        """Abandon and return all restores. Their blocks stay the tier's, because copies may still write."""
        restores = list(self.restores)
        for restore in restores:
            self._forget(restore)
        self.under_way.clear()
        return restores

    def _end(self, restore: Restore) -> None:
        generations = self.index.leases.generation[restore.block_ids]
        self.index.seal(TIER, restore.block_ids, generations, b"".join(restore.keys))
        self._forget(restore)

    def _forget(self, restore: Restore) -> None:
        self.restores.remove(restore)
        for key in restore.keys:
            del self.of_key[key]
        self.slots.let_go(restore.slots[::-1])  # the end of a text is evicted first
