"""The blocks of a pool that has several groups, and their numbers.

Blocks are numbered through, and each group has a range of the numbers: one says its group, its size and where it lies.
So who frees, offers or loses blocks need not know of groups; who asks for some says how many of each.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, ge
from typing import NamedTuple

from common.wire.values.kv_layout import ALIGNMENT_BYTES, Counts, KVLayout


class Place(NamedTuple):
    """Where a block lies in the memory of its pool."""

    offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class PoolShape:
    """A pool: how many blocks it has of each group, proof blocks included, one group after the other.

    The first block of each group is its **proof block**, never allocated: its pattern proves the way there.
    """

    layout: KVLayout
    num_blocks: Counts

    @cached_property
    def proof_ids(self) -> list[int]:
        """The first number of each group."""
        return list(accumulate(self.num_blocks[:-1], initial=0))

    @cached_property
    def num_ids(self) -> int:
        """Blocks in all; their numbers are below."""
        return sum(self.num_blocks)

    @cached_property
    def capacity(self) -> Counts:
        """Blocks that can be had at most."""
        return tuple(count - 1 for count in self.num_blocks)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each group's blocks begin, in bytes, and where the last one's end."""
        sizes = [group.block_bytes * count for group, count in zip(self.layout.groups, self.num_blocks, strict=True)]
        padded = (-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes[:-1])
        begins = list(accumulate(padded, initial=0))
        return [*begins, begins[-1] + sizes[-1]]

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def group_of(self, block_id: int) -> int:
        """Whose range has the number."""
        return bisect_right(self.proof_ids, block_id) - 1

    def place(self, block_id: int) -> Place:
        """Where a block lies."""
        number = self.group_of(block_id)
        num_bytes = self.layout.groups[number].block_bytes
        return Place(self.offsets[number] + (block_id - self.proof_ids[number]) * num_bytes, num_bytes)

    def count(self, block_ids: Sequence[int]) -> Counts:
        """How many these are, of each group."""
        return tuple(map(len, self.by_group(block_ids)))

    def by_group(self, block_ids: Sequence[int]) -> Sequence[Sequence[int]]:
        """Numbers that stand in any order, each with those of its group."""
        if len(self.num_blocks) == 1:
            return [block_ids]
        groups: list[list[int]] = [[] for _ in self.num_blocks]
        for block_id in block_ids:
            groups[self.group_of(block_id)].append(block_id)
        return groups

    def within_groups(self, block_ids: Sequence[int]) -> list[Sequence[int]]:
        """The same, counted from the beginning of each group, as tables on a device and copies have them."""
        first, *others = self.by_group(block_ids)
        begins = self.proof_ids[1:]
        rest = ([block_id - begin for block_id in of_group] for of_group, begin in zip(others, begins, strict=True))
        return [first, *rest]


def are_enough(have: Counts, wanted: Counts) -> bool:
    """Whether there are so many of each group."""
    return all(map(ge, have, wanted))


def shown(counts: Counts) -> str:
    """As people read them, group by group."""
    return " + ".join(map(str, counts))


def plus(some: Counts, others: Counts) -> Counts:
    return tuple(map(add, some, others))


def minus(some: Counts, others: Counts) -> Counts:
    """Not below 0."""
    return tuple([max(0, count - other) for count, other in zip(some, others, strict=True)])
