"""Workers that take work now, kept in the order in which a choice looks at them.

A member notes each change of itself (`Member.changed`), and the next choice applies all changes. So a choice need not
look at every worker.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import count

from common.wire.messages.worker import Role
from router.placement.member import NO_TRANSPORT, Member
from router.placement.predictions import PoolName

Entry = tuple[float, int, int]
"""Value, turn of the last choice, number: the least is first."""


class Ranking:
    """Workers in ascending order of a value, then the longest unused, then the first that joined."""

    def __init__(self) -> None:
        self.workers: list[Member] = []
        self._entries: list[Entry] = []  # of `workers`
        self._entry_of: dict[Member, Entry] = {}

    def __getitem__(self, worker: Member) -> float:
        """Return the value of a worker in the ranking."""
        return self._entry_of[worker][0]

    def place(self, worker: Member, value: float | None) -> None:
        """Put a worker in its place; None takes it out."""
        before = self._entry_of.get(worker)
        entry = None if value is None else (value, worker.last_turn, worker.number)
        if entry == before:
            return
        if before is not None:
            place = bisect_left(self._entries, before)
            del self._entries[place], self.workers[place], self._entry_of[worker]
        if entry is not None:
            place = bisect_left(self._entries, entry)
            self._entries.insert(place, entry)
            self.workers.insert(place, worker)
            self._entry_of[worker] = entry


class Roster:
    """Registered workers, by what a choice asks for; call `update` before a choice.

    Args:
        prefill_window: see `WorkerPool`.
    """

    def __init__(self, prefill_window: float) -> None:
        self.changed: set[Member] = set()
        self.decodes = Ranking()  # that take work, by load
        self.loners: set[Member] = set()  # of these, that take no handoffs
        self.shorts: set[Member] = set()  # of these, that compute short prompts
        self.prefills: dict[Member, None] = {}  # that take work, with or without room
        self.with_room = Ranking()  # of these, by waiting tokens
        self._window = prefill_window
        self._members: set[Member] = set()
        self._token_us: dict[Member, float] = {}  # times to compute a token, as far as known
        self._least_us: float | None = 0.0  # of these, None if not known yet
        self._registered = {role: defaultdict[PoolName, dict[Member, None]](dict) for role in Role}
        self._numbers = count()

    def add(self, worker: Member) -> None:
        """Add a worker that joined."""
        worker.number = next(self._numbers)
        self._members.add(worker)
        self._registered[worker.ready.role][worker.pool][worker] = None

    def remove(self, worker: Member) -> None:
        """Remove a worker that is gone."""
        self._members.discard(worker)
        pools = self._registered[worker.ready.role]
        pools[worker.pool].pop(worker, None)
        if not pools[worker.pool]:
            del pools[worker.pool]
        self.changed.add(worker)

    def by_pool(self, role: Role) -> Mapping[PoolName, Collection[Member]]:
        """Return the registered workers of a role, in the order in which they joined."""
        return self._registered[role]

    @property
    def token_us(self) -> float:
        """Time to compute a token where that is fastest, in microseconds; 0 if unknown."""
        if self._least_us is None:
            self._least_us = min(self._token_us.values(), default=0.0)
        return self._least_us

    def update(self) -> None:
        """Apply all changes since the last call."""
        for worker in self.changed:
            self._place(worker)
        self.changed.clear()

    def _place(self, worker: Member) -> None:
        ready, work, is_there = worker.ready, worker.work, worker in self._members
        self._time(worker, worker.speeds.block_us / worker.block_size if is_there else 0.0)
        is_open = is_there and worker.is_serving and not work.has_trial
        takes_part = ready.transport != NO_TRANSPORT  # in handoffs
        if ready.role is Role.DECODE:
            self.decodes.place(worker, decode_load(worker) if is_open else None)
            (self.loners.discard if takes_part or not is_open else self.loners.add)(worker)
            (self.shorts.add if is_open and ready.short_prompt_tokens else self.shorts.discard)(worker)
            return
        is_open &= takes_part
        is_ready = is_open and has_room_in_turn(worker, self._window)
        self.with_room.place(worker, work.outstanding_tokens if is_ready else None)
        if is_open:
            self.prefills[worker] = None
        else:
            self.prefills.pop(worker, None)

    def _time(self, worker: Member, token_us: float) -> None:
        if token_us != self._token_us.get(worker, 0.0):
            self._least_us = None
            if token_us:
                self._token_us[worker] = token_us
            else:
                del self._token_us[worker]


def has_room_in_turn(worker: Member, prefill_window: float) -> bool:
    """Tell whether a worker takes a prompt in turn; prompts sent ahead of their turn do not count."""
    work, ready = worker.work, worker.ready
    if ready.role is Role.DECODE:
        return work.num_assigned < ready.max_num_seqs
    return work.outstanding_tokens - sum(work.overtaking) < prefill_window * ready.max_batch_tokens


def decode_load(worker: Member) -> float:
    """Return the highest utilization of rows and memory; 1 is full.

    Blocks count if held now or expected to be held, of each group by its share of the memory that the groups divide.
    """
    ready, work = worker.ready, worker.work
    num_free = ready.num_blocks if worker.beat is None else worker.beat.num_free_blocks
    groups = zip(ready.num_blocks, num_free, work.expected_blocks, strict=False)  # a heartbeat is unchecked
    shares = [max(count - free, expected) / max(1, count) for count, free, expected in groups]
    return max(work.num_assigned / max(1, ready.max_num_seqs), sum(shares))
