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
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple, TypeVar

from common.memory.exchange import Misbehaved
from common.memory.sealed_blocks import Key, SealedBlocks
from common.wire.fields import MAX_INT32
from common.wire.kv_layout import Counts
from common.wire.pool_shape import PoolShape, are_enough

NOBODY = -1
OFFERS = -2
"""Who reads what is sealed and offered."""
Item = TypeVar("Item")


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


@dataclass(frozen=True, slots=True)
class OfferKey:
    """To whom, and which attempt of which request."""

    client: int
    request_id: str
    attempt: int


class Offered(NamedTuple):
    """Blocks by what becomes of them."""

    leased: Sequence[int]
    sealed: Sequence[int]


class BlockIndex:
    """Every block of one pool but the proof blocks.

    Args:
        on_free: told of blocks that come free.
    """

    def __init__(self, shape: PoolShape, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.shape, self.on_free = shape, on_free
        self.claims = [FREE] * shape.num_ids
        self.generation = [0] * shape.num_ids
        begins = zip(shape.proof_ids, shape.num_blocks, strict=True)
        self.free_ids = [list(range(begin + count - 1, begin, -1)) for begin, count in begins]  # by group
        self.offers: dict[OfferKey, Offered] = {}
        self.num_leased: Counter[int] = Counter()  # by client
        self.num_quarantined: Counter[int] = Counter()
        self.sealed = SealedBlocks()

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
        return self.num_leased[client] > 0 or bool(self.sealed.readings(client))

    def generations(self, block_ids: Sequence[int]) -> list[int]:
        return _items(self.generation, block_ids)

    def lease(self, client: int, counts: Counts) -> list[int]:
        """Give that many free blocks of each group, of which there must be so many."""
        assert are_enough(self.num_free, counts), "who leases looks first"
        if (num_lacking := counts[0] - len(self.free_ids[0])) > 0:
            self._release(self.sealed.evict(num_lacking))
        pairs = zip(self.free_ids, counts, strict=True)
        block_ids = [free_ids.pop() for free_ids, count in pairs for _ in range(count)]
        for block_id in block_ids:
            self.generation[block_id] = self.generation[block_id] % MAX_INT32 + 1
        self._move(block_ids, Claim(BlockState.LEASED, client))
        self.num_leased[client] += len(block_ids)
        return block_ids

    def seal(self, client: int, block_ids: Sequence[int], generations: Sequence[int], keys: Sequence[Key]) -> None:
        """A client writes these no more, and only reads them; raises Misbehaved, and changes nothing."""
        if not self.shape.layout.is_reusable:
            raise Misbehaved("blocks of this layout cannot be used again")
        leased, sealed = self._checked(client, block_ids, generations)
        if sealed:
            raise Misbehaved(f"block {sealed[0]} is sealed already")
        self.num_leased[client] -= len(leased)
        self._move(leased, SEALED)
        for block_id, key in zip(leased, keys, strict=True):
            self.sealed.seal(client, block_id, key)

    def free(self, client: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Take back what a client has or reads; raises Misbehaved, and takes nothing, if it has not all of it."""
        leased, sealed = self._checked(client, block_ids, generations)
        self.num_leased[client] -= len(leased)
        self._release(leased)
        self._let_go(client, sealed)

    def offer(
        self, client: int, key: OfferKey, block_ids: Sequence[int], generations: Sequence[int], num_sealed: int
    ) -> None:
        """From one client to another, the first of them sealed; raises Misbehaved, and changes nothing."""
        leased, sealed = self._checked(client, block_ids, generations)
        if list(sealed) != list(block_ids[:num_sealed]):
            raise Misbehaved(f"the first {num_sealed} blocks are not those that are sealed")
        if key in self.offers:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is offered already")
        self.num_leased[client] -= len(leased)
        self._move(leased, Claim(BlockState.OFFERED, key.client))
        self.sealed.move(client, OFFERS, sealed)
        self.offers[key] = Offered(leased, sealed)

    def accept(self, key: OfferKey) -> None:
        """The offer is who it was made to's own."""
        leased, sealed = self._taken(key)
        self._move(leased, Claim(BlockState.LEASED, key.client))
        self.num_leased[key.client] += len(leased)
        self.sealed.move(OFFERS, key.client, sealed)

    def decline(self, key: OfferKey) -> None:
        """Nobody takes the offer."""
        leased, sealed = self._taken(key)
        self._release(leased)
        self._let_go(OFFERS, sealed)

    def retain(self, client: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Take back all but these, and what a client was offered; raises Misbehaved, and takes nothing.

        What is sealed nobody writes: none of it is kept for him.
        """
        leased, _ = self._checked(client, block_ids, generations)
        self._forget_offers_to(client)
        self._release(self.sealed.forget(client))
        self.num_leased[client] = len(leased)
        kept = set(leased)
        self._release([block_id for block_id in self._held(client) if block_id not in kept])

    def leave(self, client: int) -> int:
        """A client is gone: nobody gets what it may still write, which is what it had or may have just accepted.

        How many blocks those are. What it reads stays as it is, too, as it may not have noticed that it was let go.
        """
        if count := self.num_leased.pop(client, 0) + self._forget_offers_to(client):
            self._move(self._held(client), Claim(BlockState.QUARANTINED, client))
            self.num_quarantined[client] = count
        return count

    def cure(self, client: int) -> int:
        """A client that is gone writes and reads no more: what it had is free. How many blocks those are."""
        self._release(self.sealed.forget(client))
        count = self.num_quarantined.pop(client, 0)
        if count:
            self._release(self._held(client))
        return count

    def _checked(self, client: int, block_ids: Sequence[int], generations: Sequence[int]) -> Offered:
        """Those that are leased, and those that are sealed.

        Raises Misbehaved unless all are this client's, by these very leases: to write, each named once, or to read, no
        more often than it does.
        """
        try:
            claims, leased = _items(self.claims, block_ids), self.generations(block_ids)
        except IndexError:
            raise Misbehaved(f"block {max(block_ids)} of a pool of {self.shape.num_ids}") from None
        own = Claim(BlockState.LEASED, client)
        if _are_all(claims, own) and leased == generations and len(set(block_ids)) == len(block_ids):
            return Offered(block_ids, ())
        split: dict[Claim, list[int]] = {own: [], SEALED: []}
        for block_id, claim, lease, generation in zip(block_ids, claims, leased, generations, strict=True):
            if claim not in split:
                raise Misbehaved(f"block {block_id} is {claim.state.name}, and not its own")
            if lease != generation:
                raise Misbehaved(f"block {block_id} is of generation {lease}, not {generation}")
            split[claim].append(block_id)
        if len(set(split[own])) != len(split[own]):
            raise Misbehaved("a block is named twice")
        if not Counter(split[SEALED]) <= self.sealed.readings(client):
            raise Misbehaved("a block is sealed, and it does not read it so often")
        return Offered(split[own], split[SEALED])

    def _taken(self, key: OfferKey) -> Offered:
        offered = self.offers.pop(key, None)
        if offered is None:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is not offered to it")
        return offered

    def _forget_offers_to(self, client: int) -> int:
        """What was leased of them has it for its client all the same. How many blocks those are."""
        taken = [self.offers.pop(key) for key in list(self.offers) if key.client == client]
        for offered in taken:
            self._let_go(OFFERS, offered.sealed)
        return sum(len(offered.leased) for offered in taken)

    def _let_go(self, client: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._release(self.sealed.let_go(client, block_ids))

    def _held(self, client: int) -> list[int]:
        """In whatever state."""
        return [block_id for block_id, claim in enumerate(self.claims) if claim.client == client]

    def _release(self, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        if self.on_free is not None:
            self.on_free(block_ids)
        self._move(block_ids, FREE)
        for free_ids, freed in zip(self.free_ids, self.shape.by_group(block_ids), strict=True):
            free_ids += freed

    def _move(self, block_ids: Sequence[int], claim: Claim) -> None:
        claims = self.claims
        for block_id in block_ids:
            claims[block_id] = claim


def _items(values: list[Item], places: Sequence[int]) -> list[Item]:
    """Those at so many places, of which a long prompt has thousands: not one by one."""
    return list(itemgetter(*places)(values)) if len(places) > 1 else [values[place] for place in places]


def _are_all(claims: list[Claim], claim: Claim) -> bool:
    """Whether all are equal to it; most are the same as the first, not merely equal."""
    return not claims or (claims[0] == claim and claims.count(claims[0]) == len(claims))
