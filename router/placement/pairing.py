"""Search for the cheapest pair of workers, without a look at every pair.

The cost of a pair is a sum of a prefill cost and a decode cost, plus a cost of moving KV between two pools. So among
prefill workers with a path to every decode worker, only two can be best for a given decode worker. The candidates are
the best in the decode worker's pool and the best in all other pools. Prefill workers with fewer paths are compared for
each of their partners.
"""

from collections.abc import Iterable, Iterator

from router.placement.costs import Costs, Pair
from router.placement.kv_paths import KVPaths
from router.placement.member import Member
from router.placement.prefix_map import PoolName
from router.placement.route import Demand

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
            weight, moving, pool = *self._costs.decoding(decode), decode.pool
            for prefill in (*self._best_for(pool), *partners):
                cost = self._prompt_costs[prefill] + weight + (moving if prefill.pool != pool else 0.0)
                order = self._order(prefill, decode, cost)
                if least is None or order < least:
                    least, chosen = order, (prefill, decode)
        return chosen, num_pairs

    def _best_for(self, pool: PoolName) -> Iterator[Member]:
        """Yield the best fully connected prefill worker in a pool, and the best outside of the pool."""
        if (worker := self._best.get(pool)) is not None:
            yield worker
        for elsewhere, worker in self._best.items():
            if elsewhere != pool:
                yield worker
                return

    def _prompt_order(self, prefill: Member) -> tuple[bool, float, int]:
        return prefill is self._avoided, self._prompt_costs[prefill], prefill.last_turn

    def _order(self, prefill: Member, decode: Member, cost: float) -> Order:
        return decode is self._avoided, prefill is self._avoided, cost, decode.last_turn, prefill.last_turn
