"""Who has which block of a pool, and since when. Knows clients by number; no memory, no sockets.

    FREE ──lease──▶ LEASED ──offer──▶ OFFERED ──accept──▶ LEASED (by whom it was offered to)
      ▲               │ │                ├──decline──▶ FREE
      ├─────free──────┘ └──its holder is gone, or who it was offered to (and may have just taken it)──▶ QUARANTINED
      └──────────────────────────────────────it writes no more───────────────────────────────────┘

Every lease of a block is a new generation of it, and whoever says something of a block says which one: what is said of
an earlier one is refused. Nothing here is written by two: a block is one client's while it is LEASED, and nobody's
otherwise.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple, TypeVar

from common.memory.exchange import Misbehaved
from common.wire.fields import MAX_INT32
from common.wire.kv_layout import Counts
from common.wire.pool_shape import PoolShape, are_enough

NOBODY = -1
Item = TypeVar("Item")


class BlockState(IntEnum):
    FREE = 0
    LEASED = 1
    OFFERED = 2
    QUARANTINED = 3


class Claim(NamedTuple):
    """What a block is to whom."""

    state: BlockState
    client: int  # of what is offered, who may take it; of what is quarantined, who had it


FREE = Claim(BlockState.FREE, NOBODY)


@dataclass(frozen=True, slots=True)
class OfferKey:
    """To whom, and which attempt of which request."""

    client: int
    request_id: str
    attempt: int


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
        self.offers: dict[OfferKey, Sequence[int]] = {}
        self.num_leased: Counter[int] = Counter()  # by client
        self.num_quarantined: Counter[int] = Counter()

    @property
    def num_free(self) -> Counts:
        """By group."""
        return tuple(map(len, self.free_ids))

    @property
    def num_offered(self) -> int:
        return sum(map(len, self.offers.values()))

    def generations(self, block_ids: Sequence[int]) -> list[int]:
        return _items(self.generation, block_ids)

    def lease(self, client: int, counts: Counts) -> list[int]:
        """Give that many free blocks of each group, of which there must be so many."""
        assert are_enough(self.num_free, counts), "who leases looks first"
        pairs = zip(self.free_ids, counts, strict=True)
        block_ids = [free_ids.pop() for free_ids, count in pairs for _ in range(count)]
        for block_id in block_ids:
            self.generation[block_id] = self.generation[block_id] % MAX_INT32 + 1
        self._move(block_ids, Claim(BlockState.LEASED, client))
        self.num_leased[client] += len(block_ids)
        return block_ids

    def free(self, client: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Take back what a client has; raises Misbehaved, and takes nothing, if it has not all of it."""
        self._check(client, block_ids, generations)
        self.num_leased[client] -= len(block_ids)
        self._release(block_ids)

    def offer(self, client: int, key: OfferKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """From one client to another; raises Misbehaved, and changes nothing."""
        self._check(client, block_ids, generations)
        if key in self.offers:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is offered already")
        self.num_leased[client] -= len(block_ids)
        self._move(block_ids, Claim(BlockState.OFFERED, key.client))
        self.offers[key] = block_ids

    def accept(self, key: OfferKey) -> None:
        """The offer is who it was made to's own."""
        block_ids = self._taken(key)
        self._move(block_ids, Claim(BlockState.LEASED, key.client))
        self.num_leased[key.client] += len(block_ids)

    def decline(self, key: OfferKey) -> None:
        """Nobody takes the offer."""
        self._release(self._taken(key))

    def retain(self, client: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Take back all but these, and what a client was offered; raises Misbehaved, and takes nothing."""
        self._check(client, block_ids, generations)
        self._forget_offers_to(client)
        self.num_leased[client] = len(block_ids)
        kept = set(block_ids)
        self._release([block_id for block_id in self._held(client) if block_id not in kept])

    def leave(self, client: int) -> int:
        """A client is gone: nobody gets what it may still write, which is what it had or may have just accepted.

        How many blocks those are.
        """
        if count := self.num_leased.pop(client, 0) + self._forget_offers_to(client):
            self._move(self._held(client), Claim(BlockState.QUARANTINED, client))
            self.num_quarantined[client] = count
        return count

    def cure(self, client: int) -> int:
        """A client that is gone writes no more: what it had is free. How many blocks those are."""
        count = self.num_quarantined.pop(client, 0)
        if count:
            self._release(self._held(client))
        return count

    def _check(self, client: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Raise Misbehaved unless all are this client's, by this very lease, each named once."""
        if len(set(block_ids)) != len(block_ids):
            raise Misbehaved("a block is named twice")
        try:
            claims, leased = _items(self.claims, block_ids), self.generations(block_ids)
        except IndexError:
            raise Misbehaved(f"block {max(block_ids)} of a pool of {self.shape.num_ids}") from None
        if _are_all(claims, Claim(BlockState.LEASED, client)) and leased == generations:
            return
        for block_id, claim, lease, generation in zip(block_ids, claims, leased, generations, strict=True):
            if claim != Claim(BlockState.LEASED, client):
                raise Misbehaved(f"block {block_id} is {claim.state.name}, and not its own")
            if lease != generation:
                raise Misbehaved(f"block {block_id} is of generation {lease}, not {generation}")

    def _taken(self, key: OfferKey) -> Sequence[int]:
        block_ids = self.offers.pop(key, None)
        if block_ids is None:
            raise Misbehaved(f"attempt {key.attempt} of {key.request_id} is not offered to it")
        return block_ids

    def _forget_offers_to(self, client: int) -> int:
        """The blocks have it for their client all the same. How many those are."""
        return sum(len(self.offers.pop(key)) for key in list(self.offers) if key.client == client)

    def _held(self, client: int) -> list[int]:
        """In whatever state."""
        return [block_id for block_id, claim in enumerate(self.claims) if claim.client == client]

    def _release(self, block_ids: Sequence[int]) -> None:
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
