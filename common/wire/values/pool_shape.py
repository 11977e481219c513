"""Block ids of a pool with several groups.

All groups share a single sequence of block ids, and each group has a range. So an id tells a block's group, size and
place in memory. Code that frees, offers or loses blocks needs no knowledge of groups; a demand names a count per group.

Each group's blocks are numbered over the whole memory, so blocks of two groups may lie over each other. Blocks in use
never do, because each slab belongs to a single group at a time (see `slabs`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, ge
from typing import NamedTuple

import numpy as np

from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.slabs import Slabs, slabs_of


class Place(NamedTuple):
    """The memory of a block inside a pool."""

    offset: int  # bytes
    num_bytes: int


@dataclass(frozen=True)
class PoolShape:
    """The memory of a pool, and its blocks by group.

    A block of each group is its **proof block**. No sequence gets a proof block: a known pattern in the block proves a
    KV path.

    num_blocks: blocks of each group, proof blocks included, if the memory is divided for texts of usual length; they
        set the pool's size. floor: blocks that each group can have at any time; without, all of `num_blocks`, so no
        group lends memory to another.
    """

    layout: KVLayout
    num_blocks: Counts
    floor: Counts = ()

    @staticmethod
    def within(num_bytes: int, layout: KVLayout, usual_tokens: int, most_tokens: int, step_tokens: int) -> "PoolShape":
        """Return a shape of at most `num_bytes` whose groups lend memory to each other.

        Args:
            usual_tokens: of a text of usual length.
            most_tokens: of the longest text. What such a text needs is not lent.
            step_tokens: most tokens of a prompt step.
        """
        shape = PoolShape.lending(
            layout, layout.divided(num_bytes, usual_tokens, step_tokens), most_tokens, step_tokens
        )
        if (excess := shape.num_bytes - num_bytes) > 0:
            num_blocks = layout.divided(num_bytes - excess, usual_tokens, step_tokens)
            shape = PoolShape.lending(layout, num_blocks, most_tokens, step_tokens)
        return shape

    @staticmethod
    def lending(layout: KVLayout, num_blocks: Counts, num_tokens: int, step_tokens: int) -> "PoolShape":
        """Return a shape whose groups lend memory, as far as a sequence of `num_tokens` tokens does not need it.

        The floor of a group is what the sequence has there, or the group's share if that is less.
        """
        most = layout.most_blocks(num_tokens, step_tokens)
        floor = tuple(min(count - 1, each) for count, each in zip(num_blocks, most, strict=True))
        lasting = [group.is_append_only for group in layout.groups]
        if lasting.count(True) == 1:
            bare = tuple(0 if is_lasting else count for is_lasting, count in zip(lasting, floor, strict=True))
            shape = PoolShape(layout, num_blocks, bare)
            if are_enough(shape.assured, floor):
                return shape
        return PoolShape(layout, num_blocks, floor)

    @cached_property
    def slabs(self) -> Slabs:
        """The division of the memory into slabs."""
        return slabs_of(self.layout, self.num_blocks, self.floor or self.shares)

    @cached_property
    def _lengths(self) -> list[int]:
        """Numbers of block ids, by group."""
        return [self.num_bytes // group.block_bytes for group in self.layout.groups]

    @cached_property
    def begins(self) -> list[int]:
        """The first block id of each group."""
        return list(accumulate(self._lengths[:-1], initial=0))

    @cached_property
    def proof_ids(self) -> list[int]:
        """The proof block of each group: the first one in the slab of the group's number."""
        return [self.ids_in(number, slab=number)[0] for number in range(len(self.begins))]

    @cached_property
    def num_ids(self) -> int:
        """Number of all block ids; every block id is below."""
        return sum(self._lengths)

    @cached_property
    def shares(self) -> Counts:
        """Blocks of each group without proof blocks, if the memory is divided for texts of usual length."""
        return tuple(count - 1 for count in self.num_blocks)

    @cached_property
    def capacity(self) -> Counts:
        """Most blocks of each group that can be leased, if the others have none."""
        return self.slabs.empty.most

    @cached_property
    def assured(self) -> Counts:
        """Blocks of each group that a lone sequence can have, wherever its other blocks lie.

        A block of another group may pin a slab of its own. A sequence has at most a floor of blocks in each group that
        does not keep all tokens. So the only group that keeps all tokens has all slabs but these.
        """
        slabs, groups = self.slabs, self.layout.groups
        assured = [floor * each - 1 for floor, each in zip(slabs.floor, slabs.num_in_each, strict=True)]
        lasting = [number for number, group in enumerate(groups) if group.is_append_only]
        if len(lasting) == 1 and self.floor:
            [number] = lasting
            pinned = sum(max(slabs.floor[n], self.floor[n] + 1) for n in range(len(groups)) if n != number)
            assured[number] = max(assured[number], (slabs.num_slabs - pinned) * slabs.num_in_each[number] - 1)
        return tuple(assured)

    @property
    def num_bytes(self) -> int:
        return self.slabs.num_bytes

    def most_tokens(self, step_tokens: int) -> int:
        """Return the length of the longest sequence that the pool can always hold, by steps of `step_tokens`."""
        return self.layout.most_tokens(self.assured, step_tokens)

    def fits(self, counts: Counts) -> bool:
        """Tell whether the pool can have so many blocks in use together."""
        return self.slabs.empty.fits(counts)

    def ids_in(self, group: int, slab: int) -> range:
        """Return the blocks of a group in a slab that it owns."""
        first = -(-slab * self.slabs.slab_bytes // self.layout.groups[group].block_bytes) + self.begins[group]
        return range(first, first + self.slabs.num_in_each[group])

    def group_of(self, block_id: int) -> int:
        """Return the group whose range holds the block id."""
        return bisect_right(self.begins, block_id) - 1

    def groups_of(self, block_ids: np.ndarray) -> np.ndarray:
        """Return the group of each block: [num_blocks] intp."""
        groups: np.ndarray = np.searchsorted(self.begins, block_ids, side="right") - 1
        return groups

    def place(self, block_id: int) -> Place:
        """Return a block's place in memory."""
        number = self.group_of(block_id)
        num_bytes = self.layout.groups[number].block_bytes
        return Place((block_id - self.begins[number]) * num_bytes, num_bytes)

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
        """Return `by_group` with ids counted from each group's first id, for block tables on a device and copies."""
        first, *others = self.by_group(block_ids)
        rest = (
            [block_id - begin for block_id in of_group] for of_group, begin in zip(others, self.begins[1:], strict=True)
        )
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
