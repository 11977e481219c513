"""Host tier: sealed blocks in host memory, kept after their eviction from the pool.

Blocks are copied to the tier in the background (`spills`). A prompt that wants them back gets copies (`restores`),
if copying is faster than computing. The tier serves a single pool at a time. Its blocks outlive the pool, for the next
pool of equal layout. After a failed or endless copy the tier is lost, and texts are computed again.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from common.memory.base.copy_costs import is_restore_faster
from common.memory.base.host_ram import ram_bytes
from common.memory.base.slot_sizes import block_sizes, slot_bytes
from common.memory.blocks.index import TIER
from common.memory.blocks.pool import Pool, Want
from common.memory.devices.backing import Backing, Copies, CopyFailed
from common.memory.host_tier.missing import missing_of
from common.memory.host_tier.restores import Restore, Restores
from common.memory.host_tier.room import HostRoom
from common.memory.host_tier.slots import HostSlots
from common.memory.host_tier.spills import Spills
from common.memory.host_tier.traffic import Traffic
from common.settings.memory_sections import MemorySection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.block_key import unpacked
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import KVLayout

logger = logging.getLogger(__name__)

IDLE_S = 20.0
"""Wait before making host memory without seals; until then starting workers would be held up by pinning."""


class ServedPool:
    """The served pool: copies under way, and the pool's view of the tier (a `HostBlocks`)."""

    def __init__(self, pool: Pool, traffic: Traffic, slots: HostSlots) -> None:
        self.pool, self.index, self.traffic, self.slots = pool, pool.index, traffic, slots
        self.spills, self.restores = Spills(traffic, slots), Restores(traffic, slots)
        slots.on_gone = self._gone
        pool.index.sealed.attach(self)

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    @property
    def copy_us(self) -> int:
        return min(math.ceil(self.traffic.slot_us), MAX_INT32)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.slots.touch(keys)

    def have(self, keys: Sequence[bytes]) -> np.ndarray:
        return np.fromiter((key in self.slots.slot_of for key in keys), bool, len(keys))

    def parked_between(self, begin: int, end: int) -> np.ndarray:
        """Return keys of parked blocks. Blocks being read are left out, because they return or the tier ends."""
        return self._without_those_in_pool(self.slots.unread_between(begin, end))

    def end(self) -> None:
        """Detach the tier from the pool."""
        self.slots.on_gone = None
        self.index.sealed.attach(None)
        self.spills.cancel()

    def _gone(self, keys: np.ndarray) -> None:
        if (log := self.index.sealed.log).is_on:
            log.add(BlockEvent.GONE, self._without_those_in_pool(keys))

    def _without_those_in_pool(self, keys: np.ndarray) -> np.ndarray:
        block_of = self.index.sealed.block_of
        left: np.ndarray = keys[np.fromiter((key not in block_of for key in keys.tolist()), bool, len(keys))]
        return left


class HostTier:
    """The host tier of a memory server.

    Args:
        room: host memory, made from the first seal on, or `IDLE_S` after the attach of a pool.
        copies: between pools and the room.
    """

    def __init__(self, room: HostRoom, copies: Copies, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.room = room
        self.traffic = Traffic(copies, room.pieces, clock=clock)
        self._clock = clock
        self.layout: KVLayout | None = None  # of the blocks in `slots`
        self.slots = HostSlots(0)
        self.served: ServedPool | None = None
        self.is_lost = False
        self._num_in_piece = 0
        self._begin_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Tell whether copies are under way or due."""
        return self.served is not None and bool(self.served.spills.under_way or self.served.restores.restores)

    def attach(self, pool: Pool) -> None:
        """Serve a pool, unless another is served, or its blocks cannot be reused."""
        num_in_piece = self.room.piece_bytes // slot_bytes(pool.layout)
        most = num_in_piece * self.room.num_pieces
        if self.served is not None or self.is_lost or not (pool.layout.is_reusable and most):
            logger.info("this pool of KV blocks has no host tier")
            return
        if pool.layout != self.layout:
            self.layout, self._num_in_piece = pool.layout, num_in_piece
            self.slots = HostSlots(most, max(block_sizes(pool.layout)))
            self.slots.grow(num_in_piece * len(self.room.pieces))
        self.traffic.serve(pool, num_in_piece)
        self.served = ServedPool(pool, self.traffic, self.slots)
        self._begin_s = self._clock() + IDLE_S
        num_bytes = most * self.traffic.slot_bytes
        shape = pool.index.shape
        ratio = num_bytes / (shape.num_bytes - sum(group.block_bytes for group in pool.layout.groups))
        logger.info(
            "host tier: %d %s, %.2f GB, %.1f times the pool%s",
            most, "KV blocks" if len(pool.layout.groups) == 1 else "slots for KV blocks", num_bytes / 1e9, ratio,
            "" if ratio >= 2 else ", which adds little: most of it is in the pool, too; make it twice as large",
        )  # fmt: skip

    def detach(self, pool: Pool, *, keeps: bool) -> None:
        """Stop serving a pool, after waiting for its copies; forget all blocks unless `keeps`."""
        if self.served is None or self.served.pool is not pool:
            return
        try:
            self.traffic.copies.finish()
        except CopyFailed as failed:
            self._lost(failed)
        self.served.end()
        self.served.restores.cancel()
        self.served = None
        if not keeps or self.is_lost:
            self.slots.clear()

    def sealed(self, pool: Pool, keys: bytes) -> None:
        """Queue blocks with these packed keys for a copy."""
        if self.served is not None and self.served.pool is pool:
            self.room.begin()
            self.served.spills.add(unpacked(keys))

    def begin_restore(self, pool: Pool, want: Want) -> bool:
        """Begin or join a restore of the want's blocks, if worth the copies; return True if blocks will come.

        The pool must have the free blocks lacked by the want.
        """
        if self.is_lost or self.served is None or self.served.pool is not pool or want.prompt is None:
            return False
        prompt, restores, slots = want.prompt, self.served.restores, self.slots
        if not (prompt.block_us and slots.slot_of):
            return False
        missing = missing_of(pool.index.sealed, slots.slot_of, prompt.keys)
        if not missing.keys:
            return False
        if under_way := [restores.of_key[key] for key in missing.keys if key in restores.of_key]:
            under_way[0].wants.append(want)
            return True
        num_slots = sum(len(slots.all_of(slots.slot_of[key])) for key in missing.keys)
        copy_us = num_slots * self.traffic.slot_us / missing.num_places
        if not is_restore_faster(missing.num_places, pool.layout.block_size, prompt.block_us, copy_us):
            return False
        if not pool.index.fits(missing.counts, missing.others):
            return False
        others = np.concatenate(missing.others)
        pool.index.sealed.read(TIER, others)
        restores.add(missing.keys, missing.counts, others, want)
        return True

    def update(self) -> list[tuple[Pool, Restore]]:
        """Begin copies and finish others; return finished restores.

        The caller grants their wants, and then calls `release`.
        """
        self.slots.is_growing = not self.room.is_made  # read before `grow`, so a last piece is not missed
        if grown := self.room.grow():
            self.slots.grow(grown * self._num_in_piece)
        if self.served is None or self.is_lost:
            return []
        if self._clock() > self._begin_s:
            self.room.begin()
        spills, restores = self.served.spills, self.served.restores
        over: list[Restore] = []
        try:
            spills.finish()
            for restore in restores.finish():
                over.append(restore)
            restores.begin()
            if not restores.under_way:  # clients wait for restores, so spills come second
                spills.begin()
        except CopyFailed as failed:
            over += self._lost(failed)
        return [(self.served.pool, restore) for restore in over]

    def release(self, restore: Restore) -> None:
        """End the tier's references to a restore's blocks after the grant.

        Blocks of an abandoned restore stay the tier's, because copies may still write them.
        """
        assert self.served is not None
        block_ids = np.concatenate([restore.others, restore.block_ids]) if restore.is_over else restore.others
        if len(block_ids):
            index = self.served.index
            index.free(TIER, block_ids, index.leases.generation[block_ids])

    def close(self) -> None:
        """Detach the pool and free the host memory."""
        went, came = self.traffic.out_bytes / 1e9, self.traffic.in_bytes / 1e9
        logger.info("host tier: %.2f GB of KV blocks went there, %.2f GB came back", went, came)
        if self.served is not None:
            self.detach(self.served.pool, keeps=False)
        self.room.close()

    def _lost(self, failed: CopyFailed) -> list[Restore]:
        """Turn the tier off; return the abandoned restores."""
        assert self.served is not None
        logger.error("the host tier is of no use any more, so that texts are computed again: %s", failed)
        self.is_lost = True
        self.served.end()
        return self.served.restores.cancel()


def make_tier(backing: Backing, section: MemorySection) -> HostTier | None:
    """Make a tier, limited by the host's memory; None if not configured or the device cannot copy."""
    most_bytes = ram_bytes()
    num_bytes = section.host_tier_bytes or int(section.host_tier_fraction * most_bytes)
    if num_bytes > most_bytes:
        logger.warning("memory.host_tier_bytes = %d: it will have %.2f GB at most, as there is no more host memory",
                       num_bytes, most_bytes / 1e9)  # fmt: skip
        num_bytes = most_bytes
    if not num_bytes:
        return None
    try:
        return HostTier(HostRoom(num_bytes, backing.host_piece, pause=backing.host_pause), backing.copies())
    except CopyFailed as failed:
        logger.error("no host tier: %s", failed)
        return None
