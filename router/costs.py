"""What a request would cost at a pair of workers, in prompt tokens: to wait for, to compute, to move."""

from router.member import Member
from router.prefix_map import PoolName, PrefixMap
from router.route import Cost, Demand

Pair = tuple[Member, Member]
"""A prefill and a decode worker, or one that does both."""


class Costs:
    """Of one request at any pair; what lies where is looked up once a pool."""

    def __init__(self, demand: Demand, prefixes: PrefixMap) -> None:
        self._demand, self._prefixes = demand, prefixes
        self._num_there: dict[PoolName, int] = {}
        self._load: dict[Member, float] = {}

    def of(self, pair: Pair) -> Cost:
        prefill, decode = pair
        num_tokens = self._demand.num_tokens
        num_known = self._found_by(prefill, num_tokens - 1)  # one token is computed
        num_moved = 0 if prefill.pool == decode.pool else num_tokens - self._found_by(decode, num_tokens)
        if decode not in self._load:
            self._load[decode] = decode.decode_load
        return Cost(prefill.outstanding_tokens, num_known, num_tokens - num_known, num_moved, self._load[decode])

    def _found_by(self, worker: Member, most: int) -> int:
        """Tokens of its prompt, at most so many, that a worker finds in its pool."""
        text = self._demand.text_in(worker.ready.kv_layout)
        if text is None or self._demand.num_tokens < worker.ready.prefix_min_tokens:
            return 0
        if worker.pool not in self._num_there:
            self._num_there[worker.pool] = self._prefixes.num_known(worker.pool, text.keys)
        return min(self._num_there[worker.pool], most // text.block_size) * text.block_size
