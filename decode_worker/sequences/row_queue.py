"""Sequences that wait for a row of the batch, and whose turn is next.

Lower priority numbers come first. Among sequences of one priority the client with the fewest rows comes first, then the
sequence that waits longest. So a client that sends many requests waits behind itself.
"""

from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import chain, islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from decode_worker.sequences.sequence import DecodeSequence, Key


class Rank(NamedTuple):
    """The place of a sequence among all that wait; lower is earlier."""

    priority: int
    num_rows: int  # that its client has
    since_s: float  # when it began to wait for its first row, on `time.monotonic`


class Waiter(Protocol):
    """A thing that waits for a row."""

    @property
    def sequence(self) -> DecodeSequence:
        """The sequence that will be in the row."""


class Ranked(Protocol):
    """A queue for rows, as far as it is compared with others."""

    def first_rank(self) -> Rank | None:
        """Return the place of the waiter whose turn is next."""


AnyWaiter = TypeVar("AnyWaiter", bound=Waiter)

Group = tuple[int, int]
"""(priority, client)."""


def group_of(sequence: DecodeSequence) -> Group:
    """Return the group of sequences among which the order of arrival decides."""
    return sequence.priority, sequence.client


class RowQueue(Generic[AnyWaiter]):
    """Waiters by group, each group in order of arrival.

    Args:
        num_rows_of: rows that a client has.
    """

    def __init__(self, num_rows_of: Callable[[int], int]) -> None:
        self._num_rows_of = num_rows_of
        self._groups: dict[Group, dict[Key, AnyWaiter]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[AnyWaiter]:
        for group in self._groups.values():
            yield from group.values()

    def __contains__(self, key: Key) -> bool:
        return any(key in group for group in self._groups.values())

    def add(self, waiter: AnyWaiter) -> None:
        """Let a waiter wait behind those of its group that began to wait before it."""
        sequence = waiter.sequence
        group = self._groups.setdefault(group_of(sequence), {})
        is_last = not group or next(reversed(group.values())).sequence.offered_s <= sequence.offered_s
        group[sequence.key] = waiter
        if not is_last:
            in_order = sorted(group.items(), key=lambda item: item[1].sequence.offered_s)
            group.clear()
            group.update(in_order)
        self._num_waiting += 1

    def remove(self, waiter: AnyWaiter) -> None:
        """Take a waiter out; raises KeyError if it does not wait."""
        sequence = waiter.sequence
        group = self._groups[group_of(sequence)]
        del group[sequence.key]
        if not group:
            del self._groups[group_of(sequence)]
        self._num_waiting -= 1

    def first(self) -> AnyWaiter | None:
        """Return the waiter whose turn is next."""
        if not self._groups:
            return None
        heads = (next(iter(group.values())) for group in self._groups.values())
        return min(heads, key=lambda waiter: self.rank(waiter.sequence))

    def next(self, count: int) -> list[AnyWaiter]:
        """Return as many of those whose turn is next, best first."""
        heads = chain.from_iterable(islice(group.values(), count) for group in self._groups.values())
        return nsmallest(count, heads, key=lambda waiter: self.rank(waiter.sequence))

    def first_rank(self) -> Rank | None:
        """Return the place of the waiter whose turn is next."""
        waiter = self.first()
        return None if waiter is None else self.rank(waiter.sequence)

    def last(self) -> AnyWaiter:
        """Return the waiter that can best wait longer: worst priority, most rows, latest."""
        tails = (next(reversed(group.values())) for group in self._groups.values())
        return max(tails, key=lambda waiter: self.rank(waiter.sequence))

    def rank(self, sequence: DecodeSequence) -> Rank:
        """Return the place of a sequence, waiting here or elsewhere."""
        return Rank(sequence.priority, self._num_rows_of(sequence.client), sequence.offered_s)

    def find(self, request_id: str, attempt: int) -> list[AnyWaiter]:
        """Return waiters that are attempts of a request up to `attempt`."""
        return [w for w in self if w.sequence.request_id == request_id and w.sequence.attempt <= attempt]

    def clear(self) -> list[AnyWaiter]:
        """Take all waiters out and return them."""
        waiters = list(self)
        self._groups.clear()
        self._num_waiting = 0
        return waiters
