"""The KV pool of a simulated GPU: tokens held by requests, shared prefixes, and cached texts of finished requests.

A prefix takes room once, however many requests read it. Unheld tokens stay cached until room is wanted, and go in the
order of release, as in `common/memory/blocks/cached.py`. A finished text leaves its prefix, useful for later requests,
and the rest, never asked for again.
"""

from collections import Counter
from dataclasses import dataclass, field

from common.wire.messages.memory_reports import BlockEvent
from deploy.planning.simulation.loads import Prefix
from deploy.planning.simulation.request import Request
from router.placement.prefix_map import PoolContents


@dataclass(slots=True, eq=False)
class Pool:
    """A KV pool, measured in tokens.

    Invariant: cached tokens are at most the free tokens.
    """

    num_tokens: int
    contents: PoolContents  # prefixes known to the router
    free_tokens: int = field(init=False)  # not held by any request; includes cached tokens
    computing: dict[Prefix, Request] = field(default_factory=dict)  # with the request that computes it
    _readers: Counter[Prefix] = field(default_factory=Counter)
    _kept: dict[object, int] = field(default_factory=dict)  # cached tokens by prefix or other text, next to evict first
    _num_kept: int = 0

    def __post_init__(self) -> None:
        self.free_tokens = self.num_tokens

    def has(self, prefix: Prefix | None) -> bool:
        """Tell whether a prefix need not be computed."""
        return prefix is not None and prefix not in self.computing and (prefix in self._readers or prefix in self._kept)

    def wanted(self, request: Request, num_own: int) -> int:
        """Return the room needed for `num_own` tokens and the prefix of a request."""
        prefix = request.prefix
        return num_own + (prefix.num_tokens if prefix is not None and prefix not in self._readers else 0)

    def take(self, request: Request, num_own: int) -> None:
        """Hold `num_own` tokens and the prefix of a request."""
        if (prefix := request.prefix) is not None:
            if not self._readers[prefix]:
                self.free_tokens -= prefix.num_tokens
                self._num_kept -= self._kept.pop(prefix, 0)
                self.contents.note(BlockEvent.SEALED, prefix.keys)
            self._readers[prefix] += 1
        self.free_tokens -= num_own
        self._evict()

    def give_back(self, request: Request, num_own: int) -> None:
        """Release `num_own` tokens and the prefix; both stay cached while there is room."""
        self.free_tokens += num_own
        self._keep(object(), num_own)
        if (prefix := request.prefix) is not None:
            self._readers -= Counter([prefix])
            if prefix not in self._readers:
                self.free_tokens += prefix.num_tokens
                self._keep(prefix, prefix.num_tokens)
        self._evict()

    def keep(self, prefix: Prefix) -> None:
        """Cache a prefix."""
        self.contents.note(BlockEvent.SEALED, prefix.keys)
        self._keep(prefix, prefix.num_tokens)
        self._evict()

    def _keep(self, what: object, num_tokens: int) -> None:
        self._kept[what] = num_tokens
        self._num_kept += num_tokens

    def _evict(self) -> None:
        while self._num_kept > self.free_tokens:
            gone = next(iter(self._kept))
            self._num_kept -= self._kept.pop(gone)
            if isinstance(gone, Prefix):
                self.contents.note(BlockEvent.GONE, gone.keys)
