"""Who has which block of a pool, and since when. Knows clients by number; no memory, no sockets.

    FREE ──lease──▶ LEASED ──offer──▶ OFFERED ──accept──▶ LEASED (by whom it was offered to)
      ▲               │ │ │              ├──decline──▶ FREE
      ├─────free──────┘ │ └──its holder is gone, or who it was offered to (and may have just taken it)──▶ QUARANTINED
      │                 └──seal──▶ SEALED ──offer, accept, free: so it is read, and by whom──▶ SEALED
      ├──nobody reads it, and it is wanted, or not the one that its key finds──┘
      └──────────────────────────────────────it writes no more───────────────────────────────────┘

Every lease of a block is a new generation of it, and whoever says something of a block says which one: what is said of
an earlier one is refused. Nothing here is written by two: a block is one client's while it is LEASED, and nobody's
otherwise; SEALED are those that nobody writes any more, and many may read (see `sealed_blocks`).

Messages name thousands of blocks, so these are arrays: ids in any order, [num_blocks] intp, by which numpy takes and
puts fastest, and their generations, [num_blocks] int32.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NoReturn

import numpy as np

from common.memory.blocks.answers import Misbehaved
from common.memory.blocks.sealed import NONE_NAMED, Named, SealedBlocks, named
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape, are_enough

NOBODY = -1
OFFERS = -2
"""Who reads what is sealed and offered."""
TIER = -3
"""Who writes and reads what comes back from host memory (see `host_tier`)."""


class BlockState(IntEnum):
    FREE = 0
    LEASED = 1
    OFFERED = 2
    QUARANTINED = 3
    SEALED = 4


class Claim(NamedTuple):
    """What a block is to whom."""

    state: BlockState
    client: int  # of what is offered, who may take it; of what is quarantined, who had it


FREE = Claim(BlockState.FREE, NOBODY)
SEALED = Claim(BlockState.SEALED, NOBODY)


# Claims as numbers, by which those of many blocks are compared at once.
STATE_BITS = 3
LEASED_BITS, OFFERED_BITS, QUARANTINED_BITS = map(int, (BlockState.LEASED, BlockState.OFFERED, BlockState.QUARANTINED))
FREE_CODE, SEALED_CODE = (claim.client << STATE_BITS | claim.state for claim in (FREE, SEALED))


@dataclass(frozen=True, slots=True)
class OfferKey:
    """To whom, and which attempt of which request."""

    client: int
    request_id: str
    attempt: int


class Offered(NamedTuple):
    """Blocks by what becomes of them."""

    leased: np.ndarray  # [num_leased] intp
    sealed: Named


class BlockIndex:
    """Every block of one pool but the proof blocks.

    Args:
        on_free: told of blocks that come free.
    """

    def __init__(self, shape: PoolShape, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.shape, self.on_free = shape, on_free
        self._claims = np.full(shape.num_ids, FREE_CODE, np.int64)  # by block
        self.generation = np.zeros(shape.num_ids, np.int32)  # the last of each
        begins = zip(shape.proof_ids, shape.num_blocks, strict=True)
        self.free_ids = [list(range(begin + count - 1, begin, -1)) for begin, count in begins]  # by group
        self.offers: dict[OfferKey, Offered] = {}
        self.num_leased: Counter[int] = Counter()  # by client
        self.num_quarantined: Counter[int] = Counter()
        self.sealed = SealedBlocks(shape.num_ids)

    @property
    def num_free(self) -> Counts:
        """By group; those that are cached are there for who wants them."""
        first, *others = map(len, self.free_ids)
        return (first + len(self.sealed.cached), *others)

    @property
    def num_offered(self) -> int:
        return sum(len(offered.leased) for offered in self.offers.values())

    def holds(self, client: int) -> bool:
        """Whether a client has some to write or to read."""
        return self.num_leased[client] > 0 or self.sealed.num_of_client[client] > 0

    def claim(self, block_id: int) -> Claim:
        """What that block is to whom."""
        client, state = divmod(int(self._claims[block_id]), 1 << STATE_BITS)
        return Claim(BlockState(state), client)

    def generations(self, block_ids: np.ndarray) -> np.ndarray:
        """Of these blocks: [num_blocks] int32."""
        generations: np.ndarray = self.generation[block_ids]
        return generations

    def lease(self, client: int, counts: Counts) -> np.ndarray:
        """Give that many free blocks of each group, of which there must be so many: [sum(counts)] intp."""
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
        """A client writes these no more, and only reads them; raises Misbehaved, and changes nothing.

        `keys` are packed, see `block_key`.
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
        """Take back what a client has or reads; raises Misbehaved, and takes nothing, if it has not all of it."""
        leased, sealed = self._checked(client, block_ids, generations)
        self.num_leased[client] -= len(leased)
        self._release(leased)
        self._let_go(client, sealed)

    def offer(
        self, client: int, key: OfferKey, block_ids: np.ndarray, generations: np.ndarray, num_sealed: int
    ) -> None:
        """From one client to another, the first of them sealed; raises Misbehaved, and changes nothing."""
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
        """The offer is who it was made to's own."""
        leased, sealed = self._taken(key)
        self._claims[leased] = key.client << STATE_BITS | LEASED_BITS
        self.num_leased[key.client] += len(leased)
        self._move(OFFERS, key.client, sealed)

    def decline(self, key: OfferKey) -> None:
        """Nobody takes the offer."""
        leased, sealed = self._taken(key)
        self._release(leased)
        self._let_go(OFFERS, sealed)

    def retain(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> None:
        """Take back all but these, and what a client was offered; raises Misbehaved, and takes nothing.

        What is sealed nobody writes: none of it is kept for him.
        """
        leased, _ = self._checked(client, block_ids, generations)
        self._forget_offers_to(client)
        self._release(self.sealed.forget(client))
        self.num_leased[client] = len(leased)
        held = self._held(client)
        self._release(held[~np.isin(held, leased)])

    def leave(self, client: int) -> int:
        """A client is gone: nobody gets what it may still write, which is what it had or may have just accepted.

        How many blocks those are. What it reads stays as it is, too, as it may not have noticed that it was let go.
        """
        if count := self.num_leased.pop(client, 0) + self._forget_offers_to(client):
            self._claims[self._held(client)] = client << STATE_BITS | QUARANTINED_BITS
            self.num_quarantined[client] = count
        return count

    def cure(self, client: int) -> int:
        """A client that is gone writes and reads no more: what it had is free. How many blocks those are."""
        self._release(self.sealed.forget(client))
        count = self.num_quarantined.pop(client, 0)
        if count:
            self._release(self._held(client))
        return count

    def _checked(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> Offered:
        """Those that are leased, and those that are sealed.

        Raises Misbehaved unless all are this client's, by these very leases: to write, each named once, or to read, no
        more often than it does.
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
        if sealed.total and not self.sealed.reads(client, sealed):
            raise Misbehaved("a block is sealed, and it does not read it so often")
        return Offered(leased, sealed)

    def _refuse(self, client: int, block_ids: np.ndarray, generations: np.ndarray) -> NoReturn:
        """Say of the first of them that is not its own by that lease why."""
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
        """What is in them it has all the same, as it may have accepted. How many blocks are leased of that."""
        taken = [self.offers.pop(key) for key in list(self.offers) if key.client == client]
        for offered in taken:
            self._move(OFFERS, client, offered.sealed)
        return sum(len(offered.leased) for offered in taken)

    def _move(self, client: int, other: int, sealed: Named) -> None:
        if sealed.total:
            self.sealed.move(client, other, sealed)

    def _let_go(self, client: int, sealed: Named) -> None:
        if sealed.total:
            self._release(self.sealed.let_go(client, sealed))

    def _held(self, client: int) -> np.ndarray:
        """In whatever state: [num_held] intp."""
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
