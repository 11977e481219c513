"""Block ids of a pool with several groups.

All groups share a single sequence of block ids, and each group has a range. So an id tells a block's group, size and
place in memory. Code that frees, offers or loses blocks needs no knowledge of groups; a demand names a count per group.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, ge
from typing import NamedTuple

import numpy as np

from common.wire.values.kv_layout import ALIGNMENT_BYTES, Counts, KVLayout


class Place(NamedTuple):
    """The memory of a block inside a pool."""

    offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class PoolShape:
    """The blocks of a pool by group, proof blocks included; groups follow each other in memory.

    The first block of each group is the **proof block**. No sequence gets a proof block: a known pattern in the block
    proves a KV path.
    """

    layout: KVLayout
    num_blocks: Counts

    @cached_property
    def proof_ids(self) -> list[int]:
        """The first block id of each group, which is the proof block."""
        return list(accumulate(self.num_blocks[:-1], initial=0))

    @cached_property
    def num_ids(self) -> int:
        """Number of all blocks; every block id is below."""
        return sum(self.num_blocks)

    @cached_property
    def capacity(self) -> Counts:
        """Most blocks that can be leased, by group: all but proof blocks."""
        return tuple(count - 1 for count in self.num_blocks)

    @cached_property
    def offsets(self) -> list[int]:
        """The first byte of each group, then the end of the last group."""
        sizes = [group.block_bytes * count for group, count in zip(self.layout.groups, self.num_blocks, strict=True)]
        padded = (-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes[:-1])
        begins = list(accumulate(padded, initial=0))
        return [*begins, begins[-1] + sizes[-1]]

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def group_of(self, block_id: int) -> int:
        """Return the group whose range holds the block id."""
        return bisect_right(self.proof_ids, block_id) - 1

    def groups_of(self, block_ids: np.ndarray) -> np.ndarray:
        """Return the group of each block: [num_blocks] intp."""
        groups: np.ndarray = np.searchsorted(self.proof_ids, block_ids, side="right") - 1
        return groups

    def place(self, block_id: int) -> Place:
        """Return a block's place in memory."""
        number = self.group_of(block_id)
        num_bytes = self.layout.groups[number].block_bytes
        return Place(self.offsets[number] + (block_id - self.proof_ids[number]) * num_bytes, num_bytes)

    def count(self, block_ids: Sequence[int]) -> Counts:
        """Count the blocks of each group."""
        return tuple(map(len, self.by_group(block_ids)))

    def by_group(self, block_ids: Sequence[int]) -> Sequence[Sequence[int]]:
        """Split block ids by group; the order inside a group stays."""
        if len(self.num_blocks) == 1:
            return [block_ids]
        groups: list[list[int]] = [[] for _ in self.num_blocks]
        for block_id in block_ids:
            groups[self.group_of(block_id)].append(block_id)
        return groups

    def within_groups(self, block_ids: Sequence[int]) -> list[Sequence[int]]:
        """Return `by_group` with ids counted from each group's first block, for block tables on a device and copies."""
        first, *others = self.by_group(block_ids)
        begins = self.proof_ids[1:]
        rest = ([block_id - begin for block_id in of_group] for of_group, begin in zip(others, begins, strict=True))
        return [first, *rest]


def are_enough(have: Counts, wanted: Counts) -> bool:
    """Tell whether `have` holds at least `wanted` blocks of each group."""
    return all(map(ge, have, wanted))


def shown(counts: Counts) -> str:
    """Format counts for people, group by group."""
    return " + ".join(map(str, counts))


def plus(some: Counts, others: Counts) -> Counts:
    return tuple(map(add, some, others))


def minus(some: Counts, others: Counts) -> Counts:
    """Subtract group by group, not below 0."""
    return tuple([max(0, count - other) for count, other in zip(some, others, strict=True)])
