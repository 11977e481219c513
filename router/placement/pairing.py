"""Search for the cheapest pair of workers, without a look at every pair.

The cost of a pair is a sum of a prefill cost and a decode cost, plus a cost of moving KV between two pools. That cost
depends on the rate of their path. So few prefill workers can be best for a decode worker: the best in its pool, and the
best of other pools at each rate. Decode workers are looked at by ascending load, prefill workers by ascending cost,
until no other can be as good.
"""

import math
from collections.abc import Iterable, Iterator, Sequence, Set
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
        self._limit = math.inf  # cost of the best pair, if without an avoided worker: a dearer one cannot win

    def best(self, decodes: Sequence[Member], alone: Sequence[Member]) -> Pair | None:
        """Return the best pair; a worker of `alone` forms a pair with itself."""
        for decode in self._avoided_last(alone):
            weight = self._weight(decode)
            if self._costs.least + weight > self._limit:
                break
            self._offer(decode, decode, weight)
        if self._with_room:
            floor = self._prompt_order(next(self._in_order()))[1]
            for decode in self._avoided_last(decodes):
                least = floor + self._weight(decode)
                if least > self._limit:
                    break
                if not (self._best and least == self._limit and decode.last_turn > self._best[0][3]):
                    self._offer_pairs(decode, least)
        return self._best[1] if self._best else None

    def _offer_pairs(self, decode: Member, least: float) -> None:
        """Offer the best prefill worker in a decode worker's pool, and the best outside of it at each rate.

        Args:
            least: cost of the pair with the best of all prefill workers, if nothing had to be moved.
        """
        weight, partners = self._weight(decode), self._paths.partners(decode)
        here = self._roster.by_pool(Role.PREFILL).get(decode.pool, ())
        self._offer_few([prefill for prefill in here if prefill in partners], decode, weight)
        for rate, members in self._paths.by_rate(decode).items():
            moving = self._costs.moving(decode, rate)
            if least + moving > self._limit:
                continue
            if 4 * len(members) ** 2 < len(self._with_room):  # the shorter way: of many, one is soon met in order
                self._offer_few(members, decode, weight, moving)
            elif not members.isdisjoint(self._with_room):
                self._offer_first(members, decode, weight, moving)

    def _offer_few(self, members: Iterable[Member], decode: Member, weight: float, moving: float = 0.0) -> None:
        """Offer the best of few prefill workers, of those that may win."""
        least, limit = self._costs.least, self._limit
        able = [each for each in members if each.work.outstanding_tokens + least + weight + moving <= limit]
        if able := [each for each in able if each in self._with_room]:
            self._offer(min(able, key=self._prompt_order), decode, weight, moving)

    def _offer_first(self, members: Set[Member], decode: Member, weight: float, moving: float) -> None:
        """Offer the first in order of many prefill workers, unless all that may win are others."""
        for prefill in self._in_order():
            if self._prompt_order(prefill)[1] + weight + moving > self._limit:
                return
            if prefill in members:
                self._offer(prefill, decode, weight, moving)
                return

    def _offer(self, prefill: Member, decode: Member, weight: float, moving: float = 0.0) -> None:
        """Keep a pair if it is the best so far."""
        cost = self._prompt_order(prefill)[1] + weight + moving
        if cost > self._limit:
            return
        order = self._order(prefill, decode, cost)
        if self._best is None or order < self._best[0]:
            self._best = order, (prefill, decode)
            if self._avoided not in (prefill, decode):
                self._limit = cost

    def _in_order(self) -> Iterator[Member]:
        """Yield prefill workers, the best first."""
        yield from self._first
        for worker in self._next:
            self._first.append(worker)
            yield worker

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
