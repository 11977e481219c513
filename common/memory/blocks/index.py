"""State and holder of each block of a pool, by lease. Knows clients by number; no memory, no sockets.

    lease:   FREE ──▶ LEASED.
    free:    LEASED ──▶ FREE.
    offer:   LEASED ──▶ OFFERED; a SEALED block stays SEALED.
    accept:  OFFERED ──▶ LEASED, by the target of the offer.
    decline: OFFERED ──▶ FREE.
    seal:    LEASED ──▶ SEALED; from then on offer, accept and free change the readers only.
    last reader gone: still SEALED, now cached, if the key finds the block; else FREE.
    evict:   SEALED and cached ──▶ FREE.
    leave:   LEASED, OFFERED ──▶ QUARANTINED, after the end of the holder or target, which may have just accepted.
    cure:    QUARANTINED ──▶ FREE, because the process writes no more.

Every lease of a block is a new generation. A message about a block names the generation, and a message about an earlier
generation is refused. So no block has two writers: a LEASED block has a single client, other blocks have none. A SEALED
block is immutable, and many clients may read the block (see `sealed`).

Messages name thousands of blocks, so blocks are arrays: ids in any order, [num_blocks] intp, because numpy indexes
fastest by intp, and generations, [num_blocks] int32.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NoReturn

import numpy as np

from common.memory.blocks.answers import Misbehaved
from common.memory.blocks.readers import NONE_NAMED, Named, named
from common.memory.blocks.sealed import SealedBlocks
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape, are_enough

NOBODY = -1
OFFERS = -2
"""Client number that reads sealed blocks of open offers."""
TIER = -3
"""Client number that writes and reads blocks restored from host memory (see `host_tier`)."""


class BlockState(IntEnum):
    """State of a block."""

    FREE = 0
    LEASED = 1
    OFFERED = 2
    QUARANTINED = 3
    SEALED = 4


class Claim(NamedTuple):
    """State of a block, and its client."""

    state: BlockState
    client: int  # target if OFFERED; last holder if QUARANTINED


FREE = Claim(BlockState.FREE, NOBODY)
SEALED = Claim(BlockState.SEALED, NOBODY)


# Claims as numbers, to compare many at once.
STATE_BITS = 3
LEASED_BITS, OFFERED_BITS, QUARANTINED_BITS = map(int, (BlockState.LEASED, BlockState.OFFERED, BlockState.QUARANTINED))
FREE_CODE, SEALED_CODE = (claim.client << STATE_BITS | claim.state for claim in (FREE, SEALED))


@dataclass(frozen=True, slots=True)
class OfferKey:
    """Target client of an offer, and the attempt of a request."""

    client: int
    request_id: str
    attempt: int


class Offered(NamedTuple):
    """Named blocks, split into leased and sealed blocks."""

    leased: np.ndarray  # [num_leased] intp
    sealed: Named


class BlockIndex:
    """Every block of a pool except the proof blocks.

    Args:
        on_free: called with blocks that come free.
    """

    def __init__(self, shape: PoolShape, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.shape, self.on_free = shape, on_free
        self._claims = np.full(shape.num_ids, FREE_CODE, np.int64)  # by block
        self.generation = np.zeros(shape.num_ids, np.int32)  # latest, by block
        begins = zip(shape.proof_ids, shape.num_blocks, strict=True)
        self.free_ids = [list(range(begin + count - 1, begin, -1)) for begin, count in begins]  # by group
        self.offers: dict[OfferKey, Offered] = {}
        self.num_leased: Counter[int] = Counter()  # by client
        self.num_quarantined: Counter[int] = Counter()
        self.sealed = SealedBlocks(shape.num_ids)

    @property
    def num_free(self) -> Counts:
        """Free blocks by group, cached blocks included."""
        first, *others = map(len, self.free_ids)
        return (first + len(self.sealed.cached), *others)

    @property
    def num_offered(self) -> int:
        return sum(len(offered.leased) for offered in self.offers.values())

    def holds(self, client: int) -> bool:
        """Tell whether a client holds blocks, to write or to read."""
        return self.num_leased[client] > 0 or self.sealed.readers.num_of_client[client] > 0

    def claim(self, block_id: int) -> Claim:
        """Return state and client of a block."""
        client, state = divmod(int(self._claims[block_id]), 1 << STATE_BITS)
        return Claim(BlockState(state), client)

    def generations(self, block_ids: np.ndarray) -> np.ndarray:
        """Return generations of blocks: [num_blocks] int32."""
        generations: np.ndarray = self.generation[block_ids]
        return generations

    def lease(self, client: int, counts: Counts) -> np.ndarray:
        """Lease free blocks of each group: [sum(counts)] intp.

        The caller checks `num_free` first. Evicts cached blocks of the first group if needed.
        """
        assert are_enough(self.num_free, counts), "who leases looks first"
        if (num_lacking := counts[0] - len(self.free_ids[0])) > 0:
            self._release(self.sealed.evict(num_lacking))
        leased: list[int] = []
        for free_ids, count in zip(self.free_ids, counts, strict=True):
            leased += free_ids[: -count - 1 : -1]
            del free_ids[len(free_ids) - count :]
        block_ids = np.array(leased, np.intp)
        self.generation[block_ids] = self.generation[block_ids] % MAX_INT32 + 1
        self._claims[block_ids] = client << STATE_BITS | LEASED_BITS
        self.num_leased[client] += len(block_ids)
        return block_ids

    def seal(self, client: int, block_ids: np.ndarray, generations: np.ndarray, keys: bytes) -> None:
        """Seal a client's leased blocks; the client reads them from now on.

        `keys` are packed (see `block_key`). Raises Misbehaved, and changes nothing.
        """
        if not self.shape.layout.is_reusable:
            raise Misbehaved("blocks of this layout cannot be used again")
        leased, sealed = self._checked(client, block_ids, generations)
        if sealed.total:
            raise Misbehaved(f"block {sealed.block_ids[0]} is sealed already")
        self.num_leased[client] -= len(leased)
        self._claims[leased] = SEALED_CODE
        self.sealed.seal(client, leased, keys)

    def free(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> None:
        """Take back blocks leased or read by a client; raises Misbehaved, and changes nothing."""
        leased, sealed = self._checked(client, block_ids, generations)
        self.num_leased[client] -= len(leased)
        self._release(leased)
        self._let_go(client, sealed)

    def offer(
        self, client: int, key: OfferKey, block_ids: np.ndarray, generations: np.ndarray, num_sealed: int
    ) -> None:
        """Offer a client's blocks to another client, sealed blocks first.

        Raises Misbehaved, and changes nothing.
        """
        leased, sealed = self._checked(client, block_ids, generations)
        are_first = not num_sealed or (self._claims[block_ids[:num_sealed]] == SEALED_CODE).all()
        if sealed.total != num_sealed or not are_first:
            raise Misbehaved(f"the first {num_sealed} blocks are not those that are sealed")
        if key in self.offers:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is offered already")
        self.num_leased[client] -= len(leased)
        self._claims[leased] = key.client << STATE_BITS | OFFERED_BITS
        self._move(client, OFFERS, sealed)
        self.offers[key] = Offered(leased, sealed)

    def accept(self, key: OfferKey) -> None:
        """Give the blocks of an offer to its target; raises Misbehaved if there is no such offer."""
        leased, sealed = self._taken(key)
        self._claims[leased] = key.client << STATE_BITS | LEASED_BITS
        self.num_leased[key.client] += len(leased)
        self._move(OFFERS, key.client, sealed)

    def decline(self, key: OfferKey) -> None:
        """Free the blocks of an offer; raises Misbehaved if there is no such offer."""
        leased, sealed = self._taken(key)
        self._release(leased)
        self._let_go(OFFERS, sealed)

    def retain(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> None:
        """Take back all blocks of a client and offers to the client, except the named leased blocks.

        Named sealed blocks are taken back too, because sealed blocks have no writer. Raises Misbehaved, and changes
        nothing.
        """
        leased, _ = self._checked(client, block_ids, generations)
        self._forget_offers_to(client)
        self._release(self.sealed.forget(client))
        self.num_leased[client] = len(leased)
        held = self._held(client)
        self._release(held[~np.isin(held, leased)])

    def leave(self, client: int) -> int:
        """Quarantine blocks of a client after the end of its connection; return the number of blocks.

        The client may still write leased blocks, and blocks of offers that may have been accepted. Sealed blocks stay
        read, because the client may not have noticed the end.
        """
        if count := self.num_leased.pop(client, 0) + self._forget_offers_to(client):
            self._claims[self._held(client)] = client << STATE_BITS | QUARANTINED_BITS
            self.num_quarantined[client] = count
        return count

    def cure(self, client: int) -> int:
        """Free all blocks of a client after its last read and write; return the number quarantined."""
        self._release(self.sealed.forget(client))
        count = self.num_quarantined.pop(client, 0)
        if count:
            self._release(self._held(client))
        return count

    def _checked(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> Offered:
        """Split blocks into leased and sealed blocks.

        Raises Misbehaved unless the client holds all blocks by these generations. A leased block may be named once, a
        sealed block as often as the client reads the block.
        """
        try:
            claims = self._claims[block_ids]
        except IndexError:
            raise Misbehaved(f"block {block_ids.max()} of a pool of {self.shape.num_ids}") from None
        leased, sealed = block_ids, NONE_NAMED
        are_leased = claims == client << STATE_BITS | LEASED_BITS
        num_others = len(block_ids) - np.count_nonzero(are_leased)
        if num_others:
            are_sealed = claims == SEALED_CODE
            num_others -= np.count_nonzero(are_sealed)
            leased, sealed = block_ids[are_leased], named(block_ids[are_sealed])
        if num_others or self.generation[block_ids].tobytes() != generations.tobytes():
            self._refuse(client, block_ids, generations)
        if len(set(leased.tolist())) != len(leased):
            raise Misbehaved("a block is named twice")
        if sealed.total and not self.sealed.readers.reads(client, sealed):
            raise Misbehaved("a block is sealed, and it does not read it so often")
        return Offered(leased, sealed)

    def _refuse(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> NoReturn:
        """Raise Misbehaved for the first block not held by the client with its generation."""
        for block_id, generation in zip(block_ids.tolist(), generations.tolist(), strict=True):
            claim = self.claim(block_id)
            if claim not in (SEALED, (BlockState.LEASED, client)):
                raise Misbehaved(f"block {block_id} is {claim.state.name}, and not its own")
            if (lease := int(self.generation[block_id])) != generation:
                raise Misbehaved(f"block {block_id} is of generation {lease}, not {generation}")
        raise AssertionError("all are its own")

    def _taken(self, key: OfferKey) -> Offered:
        offered = self.offers.pop(key, None)
        if offered is None:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is not offered to it")
        return offered

    def _forget_offers_to(self, client: int) -> int:
        """Give offers to their target, which may have accepted; return the number of leased blocks."""
        taken = [self.offers.pop(key) for key in list(self.offers) if key.client == client]
        for offered in taken:
            self._move(OFFERS, client, offered.sealed)
        return sum(len(offered.leased) for offered in taken)

    def _move(self, client: int, other: int, sealed: Named) -> None:
        if sealed.total:
            self.sealed.readers.move(client, other, sealed)

    def _let_go(self, client: int, sealed: Named) -> None:
        if sealed.total:
            self._release(self.sealed.let_go(client, sealed))

    def _held(self, client: int) -> np.ndarray:
        """Return blocks claimed by the client, in any state: [num_held] intp."""
        return np.flatnonzero(self._claims >> STATE_BITS == client)

    def _release(self, block_ids: np.ndarray) -> None:
        if not len(block_ids):
            return
        freed = block_ids.tolist()
        if self.on_free is not None:
            self.on_free(freed)
        self._claims[block_ids] = FREE_CODE
        for free_ids, of_group in zip(self.free_ids, self.shape.by_group(freed), strict=True):
            free_ids += of_group
