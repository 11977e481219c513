"""Queue of sequences waiting for a row of the batch, in the order of turns.

Lower priority numbers come first. Among sequences of equal priority the client with the fewest rows comes first, then
the sequence with the longest wait. So a client with many requests waits behind itself.
"""

from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import chain, islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from common.serving.prompts.requests import Key, is_attempt
from decode_worker.sequences.sequence import DecodeSequence


class Rank(NamedTuple):
    """Place of a sequence among all waiting sequences; lower is earlier."""

    priority: int
    num_rows: int  # rows of the client
    since_s: float  # begin of the wait for the first row, on `time.monotonic`


class Waiter(Protocol):
    """Holder of a sequence waiting for a row."""

    @property
    def sequence(self) -> DecodeSequence:
        """The sequence to be put into the row."""


AnyWaiter = TypeVar("AnyWaiter", bound=Waiter)

Group = tuple[int, int]
"""(priority, client)."""


def group_of(sequence: DecodeSequence) -> Group:
    """Return the group of a sequence; in a group the order of arrival decides."""
    return sequence.request.priority, sequence.request.client


class RowQueue(Generic[AnyWaiter]):
    """Waiters by group, each group in order of arrival.

    Args:
        num_rows_of: returns the number of a client's rows.
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
        """Queue a waiter in its group by offer time."""
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
        """Take a waiter out; raises KeyError if absent."""
        sequence = waiter.sequence
        group = self._groups[group_of(sequence)]
        del group[sequence.key]
        if not group:
            del self._groups[group_of(sequence)]
        self._num_waiting -= 1

    def first(self) -> AnyWaiter | None:
        """Return the next waiter."""
        if not self._groups:
            return None
        heads = (next(iter(group.values())) for group in self._groups.values())
        return min(heads, key=lambda waiter: self.rank(waiter.sequence))

    def next(self, count: int) -> list[AnyWaiter]:
        """Return the next `count` waiters, first turn first."""
        heads = chain.from_iterable(islice(group.values(), count) for group in self._groups.values())
        return nsmallest(count, heads, key=lambda waiter: self.rank(waiter.sequence))

    def last(self) -> AnyWaiter:
        """Return the waiter with the worst rank: worst priority, most rows, latest."""
        tails = (next(reversed(group.values())) for group in self._groups.values())
        return max(tails, key=lambda waiter: self.rank(waiter.sequence))

    def rank(self, sequence: DecodeSequence) -> Rank:
        """Return the rank of a sequence, waiting here or elsewhere."""
        return Rank(sequence.request.priority, self._num_rows_of(sequence.request.client), sequence.offered_s)

    def find(self, request_id: str, attempt: int) -> list[AnyWaiter]:
        """Return waiters that are attempts of a request up to `attempt`."""
        return [waiter for waiter in self if is_attempt(waiter.sequence.key, request_id, attempt)]
