"""The KV pool of a simulated GPU: what requests hold, prefixes that several read, what is kept of texts that are over.

A prefix takes room once, however many read it. What nobody holds is kept until room is wanted, and goes in the order in
which it was let go, as in `common/memory/blocks/cached.py`; of a text that is over that is a prefix, for those to come,
and the rest, which nobody asks for again.
"""

from collections import Counter
from dataclasses import dataclass, field

from deploy.planning.simulation.loads import Prefix
from deploy.planning.simulation.request import Request


@dataclass(slots=True, eq=False)
class Pool:
    """Rooms are tokens.

    Invariant: what is kept is no more than what is free.
    """

    num_tokens: int
    free_tokens: int = field(init=False)  # that nobody holds, what is kept among them
    known: set[Prefix] = field(default_factory=set)  # that the router takes to be there: sent here, or there already
    computing: dict[Prefix, Request] = field(default_factory=dict)  # who does
    _readers: Counter[Prefix] = field(default_factory=Counter)
    _kept: dict[object, int] = field(default_factory=dict)  # tokens of prefixes and of other texts; first to go first
    _num_kept: int = 0

    def __post_init__(self) -> None:
        self.free_tokens = self.num_tokens

    def has(self, prefix: Prefix | None) -> bool:
        """Whether it need not be computed."""
        return prefix is not None and prefix not in self.computing and (prefix in self._readers or prefix in self._kept)

    def wanted(self, request: Request, num_own: int) -> int:
        """Room that it takes to hold so many tokens and its prefix."""
        prefix = request.prefix
        return num_own + (prefix.num_tokens if prefix is not None and prefix not in self._readers else 0)

    def take(self, request: Request, num_own: int) -> None:
        """Hold so many tokens and its prefix; whoever is first to, and does not find it, is to compute it."""
        if (prefix := request.prefix) is not None:
            if not self._readers[prefix]:
                self.free_tokens -= prefix.num_tokens
                self._num_kept -= self._kept.pop(prefix, 0)
            self._readers[prefix] += 1
            self.known.add(prefix)
        self.free_tokens -= num_own
        self._evict()

    def give_back(self, request: Request, num_own: int) -> None:
        """The same, which is kept while there is room."""
        self.free_tokens += num_own
        self._keep(object(), num_own)
        if (prefix := request.prefix) is not None:
            self._readers -= Counter([prefix])
            if prefix not in self._readers:
                self.free_tokens += prefix.num_tokens
                self._keep(prefix, prefix.num_tokens)
        self._evict()

    def keep(self, prefix: Prefix) -> None:
        """Somebody has left it here."""
        self.known.add(prefix)
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
                self.known.discard(gone)
