"""Requests sent to a simulated system, and their times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_SIZE = 64
"""Tokens a KV block; fewer take longer to look up."""


class Lengths(NamedTuple):
    """Tokens of a request."""

    inputs: int
    outputs: int
    cached: int = 0  # of the prompt, cached already; less than all


class Prefix(NamedTuple):
    """First tokens of prompts; prefixes of equal number have equal tokens."""

    number: int
    num_tokens: int

    @property
    def keys(self) -> range:
        """Keys of the blocks."""
        return range(self.number << 32, (self.number << 32) + self.num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A number of different prefixes of equal length, all equally likely."""

    count: int
    num_tokens: int

    @property
    def all(self) -> list[Prefix]:
        return [Prefix(number, self.num_tokens) for number in range(self.count)]

    def num_distinct(self, num_requests: int) -> float:
        """Return the mean number of different prefixes among `num_requests` requests."""
        return self.count * (1 - (1 - 1 / self.count) ** num_requests)

    def __str__(self) -> str:
        return f"{self.count:,} prefix{'es' * (self.count > 1)} of {self.num_tokens:,}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come."""

    time_ms: float
    num_inputs: int
    num_outputs: int
    num_cached: int = 0  # of the prompt, cached on any GPU; less than all; 0 with a prefix
    prefix: Prefix | None = field(default=None, kw_only=True)  # found on GPUs that have computed it; less than all
    client: str = field(default="", kw_only=True)

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.num_inputs, self.num_outputs, self.num_cached)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at their times; with `num_streams`, each starts as soon as an earlier request ends.

    first_ms, last_ms: only requests arriving between both times are evaluated; the others fill the queues.
    known: prefixes in the pools at the beginning, as far as there is room.
    """

    arrivals: Sequence[Arrival]
    num_streams: int = 0
    first_ms: float = 0.0
    last_ms: float = float("inf")
    known: Sequence[Prefix] = ()

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and reply."""
        return max(each.num_inputs + each.num_outputs for each in self.arrivals)


def streams(count: int, lengths: Iterable[Sequence[int]]) -> Load:
    """Return a load with requests one after the other, `count` at a time."""
    return Load([Arrival(0.0, *each) for each in lengths], num_streams=count)
