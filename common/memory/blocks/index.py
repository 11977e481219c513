"""Blocks of a pool, and their ways from owner to owner. Knows clients by number; no memory, no sockets.

    lease:   FREE ──▶ LEASED.
    free:    LEASED ──▶ FREE.
    offer:   LEASED ──▶ OFFERED; a SEALED block stays SEALED.
    accept:  OFFERED ──▶ LEASED, by the target of the offer.
    decline: OFFERED ──▶ FREE.
    seal:    LEASED ──▶ SEALED; from then on offer, accept and free change the readers only.
    last reader gone: still SEALED, now cached, if the key finds the block; else FREE.
    evict:   SEALED and cached ──▶ FREE.
    leave:   LEASED, OFFERED ──▶ QUARANTINED, after the end of the holder or target, which may have just accepted.
    reclaim: QUARANTINED ──▶ FREE, because the process writes no more.

A SEALED block is immutable, and many clients may read the block (see `sealed`).

Messages name thousands of blocks, so blocks are arrays: ids in any order, [num_blocks] intp, because numpy indexes
fastest by intp, and generations, [num_blocks] int32.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from common.memory.blocks.answers import ProtocolError
from common.memory.blocks.lease_table import BlockState, Holding, LeaseTable
from common.memory.blocks.offers import OFFERS, OfferKey, Offers
from common.memory.blocks.readers import NONE_NAMED
from common.memory.blocks.sealed import SealedBlocks
from common.memory.blocks.slab_table import SlabTable
from common.memory.blocks.supply import Supply
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape, plus
from common.wire.values.slabs import Room

TIER = -3
"""Client number that writes and reads blocks restored from host memory (see `host_tier`)."""


class BlockIndex:
    """Every block of a pool except the proof blocks.

    Args:
        on_free: called with blocks that come free.
    """

    def __init__(self, shape: PoolShape, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.shape, self.on_free = shape, on_free
        self.slabs = SlabTable(shape)
        self.sealed = SealedBlocks(shape, self.slabs)
        self.supply = Supply(self.slabs, self.sealed, self._release)
        self.leases = LeaseTable(shape.num_ids, self.sealed.readers)
        self.offers = Offers(self.sealed.readers)
        self.num_quarantined: Counter[int] = Counter()  # by client

    @property
    def num_free(self) -> Counts:
        """Blocks that could be leased of each group, if the others got none; cached blocks are evicted for that."""
        return self.slabs.room.most

    @property
    def quarantined(self) -> np.ndarray:
        """All quarantined blocks: [num_blocks] intp."""
        return self.leases.in_state(BlockState.QUARANTINED) if self.num_quarantined else NONE_NAMED.block_ids

    def fits(self, counts: Counts, found: Sequence[np.ndarray] = ()) -> bool:
        """Tell whether so many blocks can be leased, and cached blocks of each group read: [num_found] intp."""
        return self.fits_in(self.slabs.room, counts, found)

    def fits_in(self, room: Room, counts: Counts, found: Sequence[np.ndarray] = ()) -> bool:
        """Tell the same for a room that may be smaller than the pool's."""
        if not found:
            return room.fits(counts)
        unread = self.sealed.unread(found)
        return room.fits(plus(counts, tuple(map(len, unread))), self.slabs.pins(unread))

    def lease(self, client: int, counts: Counts) -> np.ndarray:
        """Lease free blocks of each group: [sum(counts)] intp.

        The caller checks that they fit first. Evicts cached blocks if needed.
        """
        assert self.slabs.room.fits(counts), "who leases looks first"
        leased = self.supply.take(counts)
        block_ids = np.array(leased, np.intp)
        self.leases.begin(client, block_ids)
        return block_ids

    def seal(self, client: int, block_ids: np.ndarray, generations: np.ndarray, keys: bytes) -> None:
        """Seal a client's leased blocks; the client reads them from now on.

        `keys` are packed (see `block_key`). Raises ProtocolError, and changes nothing.
        """
        if not self.shape.layout.is_reusable:
            raise ProtocolError("blocks of this layout cannot be used again")
        leased, sealed = self.leases.checked(client, block_ids, generations)
        if sealed.total:
            raise ProtocolError(f"block {sealed.block_ids[0]} is sealed already")
        self.leases.end(client, leased, BlockState.SEALED)
        self.sealed.seal(client, leased, keys)

    def free(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> None:
        """Take back blocks leased or read by a client; raises ProtocolError, and changes nothing."""
        leased, sealed = self.leases.checked(client, block_ids, generations)
        self.leases.end(client, leased, BlockState.FREE)
        self._release(leased)
        self._release(self.sealed.let_go(client, sealed))

    def offer(
        self, client: int, key: OfferKey, block_ids: np.ndarray, generations: np.ndarray, are_sealed: np.ndarray
    ) -> None:
        """Offer a client's blocks to another client; `are_sealed` tells which are sealed: [num_blocks] bool.

        Raises ProtocolError, and changes nothing.
        """
        leased, sealed = self.leases.checked(client, block_ids, generations)
        if sealed.total != np.count_nonzero(are_sealed) or not np.array_equal(block_ids[~are_sealed], leased):
            raise ProtocolError("its offer marks other blocks as sealed than those that are")
        self.offers.add(client, key, Holding(leased, sealed))
        self.leases.end(client, leased, BlockState.OFFERED, key.client)

    def accept(self, key: OfferKey) -> None:
        """Give the blocks of an offer to its target; raises ProtocolError if there is no such offer."""
        self.leases.grant(key.client, self.offers.give(key))

    def decline(self, key: OfferKey) -> None:
        """Free the blocks of an offer; raises ProtocolError if there is no such offer."""
        leased, sealed = self.offers.take(key)
        self._release(leased)
        self._release(self.sealed.let_go(OFFERS, sealed))

    def retain(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> None:
        """Take back all blocks of a client and offers to the client, except the named leased blocks.

        Named sealed blocks are taken back too, because sealed blocks have no writer. Raises ProtocolError, and changes
        nothing.
        """
        leased, _ = self.leases.checked(client, block_ids, generations)
        self.offers.give_all(client)
        self._release(self.sealed.forget(client))
        self.leases.num_leased[client] = len(leased)
        self._release(np.setdiff1d(self.leases.claimed_by(client), leased))

    def leave(self, client: int) -> int:
        """Quarantine blocks of a client after the end of its connection; return the number of blocks.

        The client may still write leased blocks, and blocks of offers that may have been accepted. Sealed blocks stay
        read, because the client may not have noticed the end.
        """
        if count := self.leases.num_leased.pop(client, 0) + self.offers.give_all(client):
            self.leases.set(self.leases.claimed_by(client), BlockState.QUARANTINED, client)
            self.num_quarantined[client] = count
        return count

    def reclaim(self, client: int) -> int:
        """Free all blocks of a client after its last read and write; return the number quarantined."""
        self._release(self.sealed.forget(client))
        count = self.num_quarantined.pop(client, 0)
        if count:
            self._release(self.leases.claimed_by(client))
        return count

    def _release(self, block_ids: np.ndarray) -> None:
        if not len(block_ids):
            return
        freed = block_ids.tolist()
        if self.on_free is not None:
            self.on_free(freed)
        self.leases.set(block_ids, BlockState.FREE)
        self.slabs.free(freed)
