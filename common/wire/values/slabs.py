"""Slabs: equal pieces of a pool's memory, each of one group at a time; and the law of what a pool has to give.

A slab holds a fixed number of whole blocks of the group that owns it. A slab is **pinned** while one of its blocks is
in use, so neither free nor cached. Any other slab may change its owner, because cached blocks can be evicted.

The law: pinned slabs and floors fit the pool. A group's **floor** is the number of slabs that it can have at any time.
So the sum over groups of the pinned slabs, or of the floor if that is more, is never above the number of slabs. Hence
counts of groups are no independent numbers: a want is checked as a whole.

A pool of a single group is one slab, which is always pinned.
"""

from collections.abc import Iterator
from itertools import repeat
from math import gcd
from operator import add, mul
from typing import NamedTuple

from common.wire.values.kv_layout import Counts, KVLayout

MOST_SLABS = 2048
"""Most slabs of a pool; a slab in part use then wastes at most a two-thousandth of the memory."""
FEWEST_SLABS = 8
"""Fewest slabs of a pool, unless its smallest slabs are larger."""
MULTIPLES = 64
"""Sizes of slabs to choose from: so many multiples of the largest block."""


class Slabs(NamedTuple):
    """Division of a pool's memory into slabs; all tuples are by group."""

    num_slabs: int
    slab_bytes: int
    num_in_each: Counts  # blocks of the group in a slab of its own
    floor: Counts  # slabs that the group can have at any time, at least one

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def empty(self) -> "Room":
        """The room of a pool without blocks in use; proof blocks pin a slab of each group."""
        return Room(self, tuple(count - 1 for count in self.num_in_each), (1,) * len(self.floor))


class Pins(NamedTuple):
    """Slabs that are pinned once some cached blocks are read; by group."""

    num_slabs: Counts
    num_blocks: Counts  # all blocks of these slabs


class Room(NamedTuple):
    """Room of a pool for blocks, at a moment; all tuples are by group."""

    slabs: Slabs
    spare: Counts  # free and cached blocks in the group's pinned slabs
    pinned: Counts  # the group's pinned slabs

    @property
    def most(self) -> Counts:
        """Most blocks that each group could get if the others got none."""
        taken = list(map(max, self.pinned, self.slabs.floor))
        free = self.slabs.num_slabs - sum(taken)
        columns = zip(self.spare, self.slabs.num_in_each, taken, self.pinned, strict=True)
        return tuple(spare + each * max(0, own - pinned + free) for spare, each, own, pinned in columns)

    def fits(self, counts: Counts, pins: Pins | None = None) -> bool:
        """Tell whether all these blocks can be had together; with `pins`, they are read or leased beside each other."""
        room = self if pins is None else self._with(pins)
        pinned = tuple(map(add, room.pinned, room._lacking_slabs(counts)))
        taken: int = sum(map(max, pinned, self.slabs.floor))
        return taken <= max(self.slabs.num_slabs, sum(map(max, self.pinned, self.slabs.floor)))

    def num_more(self, group: int, counts: Counts) -> int:
        """Return the slabs that a group may pin while room is kept for `counts` blocks."""
        pinned = list(map(add, self.pinned, self._lacking_slabs(counts)))
        pinned[group] = self.pinned[group]
        taken = list(map(max, pinned, self.slabs.floor))
        num_left: int = self.slabs.num_slabs - sum(taken) + taken[group]
        return max(0, num_left - self.pinned[group])

    def without(self, counts: Counts) -> "Room":
        """Return what is left beside these blocks; if they do not fit, groups have their floors left."""
        slabs = self._lacking_slabs(counts)
        gained = map(mul, slabs, self.slabs.num_in_each) if self.fits(counts) else repeat(0)
        columns = zip(self.spare, gained, counts, strict=False)
        spare = tuple(max(0, spare + more - count) for spare, more, count in columns)
        return Room(self.slabs, spare, tuple(map(add, self.pinned, slabs)))

    def _with(self, pins: Pins) -> "Room":
        return Room(
            self.slabs, tuple(map(add, self.spare, pins.num_blocks)), tuple(map(add, self.pinned, pins.num_slabs))
        )

    def _lacking_slabs(self, counts: Counts) -> Counts:
        """Return the slabs that each group needs beyond its pinned ones for so many blocks."""
        columns = zip(counts, self.spare, self.slabs.num_in_each, strict=True)
        return tuple([max(0, -((spare - count) // each)) for count, spare, each in columns])


def slabs_of(layout: KVLayout, num_blocks: Counts, floor: Counts) -> Slabs:
    """Divide a pool of the bytes of `num_blocks` into slabs.

    The size of a slab has the least expected loss: bytes at its borders, and half a slab of each group.

    Args:
        num_blocks: of each group, for texts of usual length.
        floor: blocks that each group can have at any time, proof block not included.
    """
    sizes = [group.block_bytes for group in layout.groups]
    if len(sizes) == 1:
        return Slabs(1, sizes[0] * num_blocks[0], num_blocks, (1,))
    shares = [size * count for size, count in zip(sizes, num_blocks, strict=True)]
    slab_bytes = min(_candidates(sizes, sum(shares)), key=lambda each: _loss(each, sizes, shares))
    num_in_each = tuple(num_whole(slab_bytes, size) for size in sizes)
    slabs = tuple(-(-(count + 1) // each) for count, each in zip(floor, num_in_each, strict=True))
    return Slabs(max(sum(shares) // slab_bytes, sum(slabs)), slab_bytes, num_in_each, slabs)


def num_whole(slab_bytes: int, block_bytes: int) -> int:
    """Return the whole blocks in any slab, if blocks are laid side by side from the first slab on."""
    return (slab_bytes - block_bytes + gcd(slab_bytes, block_bytes)) // block_bytes


def _candidates(sizes: list[int], num_bytes: int) -> Iterator[int]:
    """Yield sizes of slabs: multiples of the largest block, with a whole block of each group."""
    largest = max(sizes)
    first = max(1, -(-num_bytes // (MOST_SLABS * largest)))
    while not all(num_whole(first * largest, size) for size in sizes):
        first += 1
    for multiple in range(first, first + MULTIPLES):
        if multiple == first or multiple * largest * FEWEST_SLABS <= num_bytes:
            yield multiple * largest


def _loss(slab_bytes: int, sizes: list[int], shares: list[int]) -> float:
    """Return the expected share of memory that no block can use."""
    used = (num_whole(slab_bytes, size) * size / slab_bytes for size in sizes)
    at_borders = sum(share * (1 - part) for share, part in zip(shares, used, strict=True))
    return (at_borders + len(sizes) * slab_bytes / 2) / sum(shares)
