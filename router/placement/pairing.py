"""Search for the cheapest pair of workers, without a look at every pair.

The cost of a pair is a sum of a prefill cost and a decode cost, plus a cost of moving KV between two pools. That cost
depends on the rate of their path. So few prefill workers can be best for a decode worker: the best in its pool, and the
best of other pools at each rate. Decode workers are looked at by ascending load, prefill workers by ascending cost,
until no other can be as good.
"""

from collections.abc import Iterator, Sequence, Set
from heapq import heapify, heappop, heappush

from common.wire.messages.worker import Role
from router.placement.costs import Costs, Pair
from router.placement.member import Member
from router.placement.route import LOAD_TOKENS, Demand
from router.placement.worker_pool import WorkerPool

Order = tuple[bool, bool, float, int, int, bool, int, int]
"""Sort key, the least is best: avoided workers last, then cost, then the longest unused, then the first that joined."""
PromptOrder = tuple[bool, float, int, int]
"""The same of a prefill worker alone."""


class Pairing:
    """Prefill workers with room, and the decode workers they can hand over to.

    Args:
        prefills: by ascending backlog, as ranked by the pool's roster; so are all decode workers by their load.
    """

    def __init__(self, prefills: Sequence[Member], pool: WorkerPool, demand: Demand, costs: Costs) -> None:
        self._paths, self._roster, self._avoided, self._costs = pool.paths, pool.roster, demand.avoided, costs
        self._with_room = set(prefills)
        self._prompt_orders: dict[Member, PromptOrder] = {}
        self._first: list[Member] = []  # the best prefill workers, in order, as far as asked for
        self._next = self._by_cost(prefills)
        self._best: tuple[Order, Pair] | None = None

    def best(self, decodes: Sequence[Member], alone: Sequence[Member]) -> Pair | None:
        """Return the best pair; a worker of `alone` forms a pair with itself."""
        for decode in self._avoided_last(alone):
            weight = self._weight(decode)
            if self._is_beaten(decode is self._avoided, False, self._costs.least + weight):
                break
            self._offer(decode, decode, weight)
        if self._with_room:
            is_avoided, floor, *_ = self._prompt_order(self._best_of(self._with_room))
            for decode in self._avoided_last(decodes):
                bound = decode is self._avoided, is_avoided, floor + self._weight(decode)
                if self._is_beaten(*bound):
                    break
                if not self._is_beaten(*bound, decode.last_turn):
                    self._offer_pairs(decode, bound)
        return self._best[1] if self._best is not None else None

    def _offer_pairs(self, decode: Member, bound: tuple[bool, bool, float]) -> None:
        """Offer the best prefill worker in a decode worker's pool, and the best outside of it at each rate."""
        weight, partners = self._weight(decode), self._paths.partners(decode)
        here = self._roster.by_pool(Role.PREFILL).get(decode.pool, ())
        if able := [prefill for prefill in here if prefill in self._with_room and prefill in partners]:
            self._offer(min(able, key=self._prompt_order), decode, weight)
        are_avoided, least = bound[:2], bound[2]
        for rate, members in self._paths.by_rate(decode).items():
            moving = self._costs.moving(decode, rate)
            if not (self._is_beaten(*are_avoided, least + moving) or members.isdisjoint(self._with_room)):
                self._offer(self._best_of(members), decode, weight, moving)

    def _offer(self, prefill: Member, decode: Member, weight: float, moving: float = 0.0) -> None:
        """Keep a pair if it is the best so far."""
        order = self._order(prefill, decode, self._prompt_order(prefill)[1] + weight + moving)
        if self._best is None or order < self._best[0]:
            self._best = order, (prefill, decode)

    def _is_beaten(self, *bound: float) -> bool:
        """Tell whether the best pair so far is better than any whose order is not before a bound."""
        return self._best is not None and bound > self._best[0]

    def _best_of(self, members: Set[Member]) -> Member:
        """Return the best of `members`, some with room, by the shorter way: many are soon met in order."""
        if 4 * len(members) ** 2 < len(self._with_room):
            return min(members & self._with_room, key=self._prompt_order)
        for worker in self._first:
            if worker in members:
                return worker
        for worker in self._next:
            self._first.append(worker)
            if worker in members:
                return worker
        raise AssertionError("no member has room")

    def _by_cost(self, prefills: Sequence[Member]) -> Iterator[Member]:
        """Yield workers in order. A backlog, and the least that the prompt costs behind any, tell when to go on."""
        ahead, least = self._costs.ahead()
        ready = [(self._prompt_order(worker), worker) for worker in ahead & self._with_room]
        heapify(ready)
        for worker in prefills:
            if worker in ahead:
                continue
            bound = (False, worker.work.outstanding_tokens + least, worker.last_turn, worker.number)
            while ready and ready[0][0] < bound:
                yield heappop(ready)[1]
            if (order := self._prompt_order(worker)) == bound:
                yield worker
            else:
                heappush(ready, (order, worker))
        while ready:
            yield heappop(ready)[1]

    def _avoided_last(self, workers: Sequence[Member]) -> Sequence[Member]:
        if self._avoided is None or self._avoided not in workers:
            return workers
        return [*(worker for worker in workers if worker is not self._avoided), self._avoided]

    def _weight(self, decode: Member) -> float:
        return LOAD_TOKENS * self._roster.decodes[decode]

    def _prompt_order(self, prefill: Member) -> PromptOrder:
        if (order := self._prompt_orders.get(prefill)) is None:
            cost = self._costs.prompt(prefill).total_behind(prefill.work.outstanding_tokens)
            order = prefill is self._avoided, cost, prefill.last_turn, prefill.number
            self._prompt_orders[prefill] = order
        return order

    def _order(self, prefill: Member, decode: Member, cost: float) -> Order:
        is_avoided, turns = (decode is self._avoided, prefill is self._avoided), (decode.last_turn, prefill.last_turn)
        return *is_avoided, cost, *turns, prefill is not decode, decode.number, prefill.number
