"""What a request would cost at a pair of workers, in prompt tokens: to wait for, to compute, to move."""

from collections.abc import Callable, Iterable

from router.member import Member
from router.prefix_map import PoolName, PrefixMap
from router.route import Cost, Demand

Pair = tuple[Member, Member]
"""A prefill and a decode worker, or one that does both."""


class Costs:
    """Of one request at any pair; what lies where is looked up once a pool.

    Args:
        reached: decode workers from whose pools a prefill worker can take blocks.
    """

    def __init__(self, demand: Demand, prefixes: PrefixMap, reached: Callable[[Member], Iterable[Member]]) -> None:
        self._demand, self._prefixes, self._reached = demand, prefixes, reached
        self._num_there: dict[PoolName, int] = {}
        self._load: dict[Member, float] = {}
        self._holders: dict[Member, Member | None] = {}  # by prefill worker

    def of(self, pair: Pair) -> Cost:
        prefill, decode = pair
        num_tokens, holder = self._demand.num_tokens, self.holder_for(prefill)
        num_known = self._found_by(prefill, prefill, num_tokens - 1)  # one token is computed
        num_taken = self._found_by(prefill, holder, num_tokens - 1) - num_known if holder else 0
        num_moved = 0 if prefill.pool == decode.pool else num_tokens - self._found_by(decode, decode, num_tokens)
        if decode not in self._load:
            self._load[decode] = decode.decode_load
        num_computed = num_tokens - num_known - num_taken
        return Cost(
            prefill.outstanding_tokens, num_known, num_taken, num_computed, num_taken + num_moved, self._load[decode]
        )

    def holder_for(self, prefill: Member) -> Member | None:
        """A decode worker whose pool has more of the prompt than the prefill worker's has, and the most."""
        if prefill not in self._holders:
            most, num_known = self._demand.num_tokens - 1, 0
            self._holders[prefill] = None
            for owner in (prefill, *self._reached(prefill)):
                if (num_found := self._found_by(prefill, owner, most)) > num_known:
                    self._holders[prefill], num_known = owner if owner is not prefill else None, num_found
        return self._holders[prefill]

    def _found_by(self, worker: Member, owner: Member, most: int) -> int:
        """Tokens of its prompt, at most so many, that a worker finds in the pool of another, or in its own."""
        text = self._demand.text_in(worker.ready.kv_layout)
        if text is None or self._demand.num_tokens < worker.ready.prefix_min_tokens:
            return 0
        if owner.pool not in self._num_there:
            self._num_there[owner.pool] = self._prefixes.num_known(owner.pool, text.keys)
        return min(self._num_there[owner.pool], most // text.block_size) * text.block_size
