"""Search for the cheapest pair of workers, without a look at every pair.

The cost of a pair is a sum of a prefill cost and a decode cost, plus a cost of moving KV between two pools. That cost
depends on the rate of their path. So among prefill workers with a path to every decode worker, few can be best for a
given decode worker. The candidates are the best in the decode worker's pool, and the best of other pools at each rate.
Prefill workers with fewer paths are compared for each of their partners.
"""

from collections.abc import Iterable, Iterator, Set

from router.placement.costs import Costs, Pair, decode_load
from router.placement.kv_paths import KVPaths
from router.placement.member import Member
from router.placement.prefix_map import PoolName
from router.placement.route import LOAD_TOKENS, Demand

Order = tuple[bool, bool, float, int, int]
"""Sort key, the least is best: avoided workers last, then cost, then the longest unused."""


class Pairing:
    """Prefill workers with room, and the decode workers they can hand over to.

    Args:
        num_decodes: registered decode workers, including workers unfit for the request.
    """

    def __init__(
        self, prefills: Iterable[Member], num_decodes: int, paths: KVPaths, demand: Demand, costs: Costs
    ) -> None:
        self._paths, self._avoided, self._costs = paths, demand.avoided, costs
        self._prompt_costs = {worker: costs.prompt(worker).total for worker in prefills}
        ordered = sorted(self._prompt_costs, key=self._prompt_order)
        self._anywhere = [worker for worker in ordered if len(paths.partners(worker)) == num_decodes]
        self._somewhere = set(ordered).difference(self._anywhere)
        self._best: dict[PoolName, Member] = {}  # of `_anywhere`, by pool; the best first
        for worker in self._anywhere:
            self._best.setdefault(worker.pool, worker)
        self._ranks = {worker: rank for rank, worker in enumerate(self._anywhere)}

    def best(self, decodes: Iterable[Member], alone: Iterable[Member]) -> tuple[Pair | None, int]:
        """Return the best pair and the number of candidates; a worker of `alone` forms a pair with itself."""
        chosen: Pair | None = None
        least: Order | None = None
        num_pairs = 0
        for worker in alone:
            num_pairs += 1
            order = self._order(worker, worker, self._costs.of((worker, worker)).total)
            if least is None or order < least:
                least, chosen = order, (worker, worker)
        for decode in decodes:
            partners = self._paths.partners(decode) & self._somewhere if self._somewhere else ()
            num_pairs += len(self._anywhere) + len(partners)
            weight, pool = LOAD_TOKENS * decode_load(decode), decode.pool
            for prefill, rate in (
                *self._best_for(decode),
                *((each, self._paths.rate(each, decode)) for each in partners),
            ):
                moving = self._costs.moving(decode, rate) if prefill.pool != pool else 0.0
                cost = self._prompt_costs[prefill] + weight + moving
                order = self._order(prefill, decode, cost)
                if least is None or order < least:
                    least, chosen = order, (prefill, decode)
        return chosen, num_pairs

    def _best_for(self, decode: Member) -> Iterator[tuple[Member, float]]:
        """Yield the best fully connected prefill worker in the pool, and the best outside of it at each rate."""
        if (worker := self._best.get(decode.pool)) is not None:
            yield worker, 0.0
        for rate, members in self._paths.by_rate(decode).items():
            if (worker := self._first(members)) is not None:
                yield worker, rate

    def _first(self, members: Set[Member]) -> Member | None:
        """Return the best fully connected worker among `members`, by the shorter way: many are soon met in order."""
        if len(members) ** 2 > len(self._anywhere):
            return next((worker for worker in self._anywhere if worker in members), None)
        return min(members & self._ranks.keys(), key=self._ranks.__getitem__, default=None)

    def _prompt_order(self, prefill: Member) -> tuple[bool, float, int]:
        return prefill is self._avoided, self._prompt_costs[prefill], prefill.last_turn

    def _order(self, prefill: Member, decode: Member, cost: float) -> Order:
        return decode is self._avoided, prefill is self._avoided, cost, decode.last_turn, prefill.last_turn
