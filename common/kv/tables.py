"""Block tables of one sequence on the host, one for each group: which block is at which place. Torch-free.

A window sees its last places only. What a table has before them serves the places to come: steps run in the order of
their launch, so a step that writes such a block runs after all that have read it.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import Counts, KVGroup, KVLayout

NO_BLOCK = -1
"""At a place that is out of sight."""


class BlockTable:
    """Blocks of one sequence in one group. Tokens are counted from 1.

    Args:
        block_ids: at the places from `num_gone` on; int32, as they travel and as devices have them.
        num_gone: places that have no block any more.
    """

    __slots__ = ("block_ids", "group", "num_gone")

    def __init__(self, group: KVGroup, block_ids: Iterable[int], num_gone: int = 0) -> None:
        self.group, self.num_gone = group, num_gone
        self.block_ids = array("i", [NO_BLOCK]) * num_gone
        self.block_ids.extend(block_ids)

    @property
    def held(self) -> "array[int]":
        """All its blocks, by place."""
        return self.block_ids[self.num_gone :]

    def num_lacking(self, seen: int, reach: int) -> int:
        """Blocks that `extend` needs."""
        num_new = self.group.num_places(reach) - len(self.block_ids)
        return max(0, num_new - max(0, self.group.first_seen(seen) - self.num_gone)) if num_new > 0 else 0

    def extend(self, seen: int, reach: int, fresh: Iterable[int] = ()) -> range:
        """Have places for `reach` tokens, with what token `seen` no longer sees, and then `fresh` blocks.

        Returns the places that are new.
        """
        begin, end = len(self.block_ids), self.group.num_places(reach)
        if begin < end:
            num_spare = min(end - begin, self.group.first_seen(seen) - self.num_gone)
            self.block_ids.extend([self._let_go() for _ in range(num_spare)])
            self.block_ids.extend(islice(fresh, end - len(self.block_ids)))
            assert len(self.block_ids) == end, "who extends a table brings what it lacks"
        return range(begin, max(begin, end))

    def trim(self, seen: int) -> list[int]:
        """Let go of all that token `seen` no longer sees; returns those blocks."""
        return [self._let_go() for _ in range(self.num_gone, self.group.first_seen(seen))]

    def _let_go(self) -> int:
        block_id, self.block_ids[self.num_gone] = self.block_ids[self.num_gone], NO_BLOCK
        self.num_gone += 1
        return block_id


Tables = Sequence[BlockTable]
"""Of one sequence, by group; none while it has no blocks."""


def tables_of(layout: KVLayout, blocks: Sequence[Iterable[int]]) -> Tables:
    """Of a sequence that begins with these blocks, by group."""
    return [BlockTable(group, block_ids) for group, block_ids in zip(layout.groups, blocks, strict=True)]


def held_by(tables: Tables) -> "array[int]":
    """All blocks of a sequence, group after group."""
    held = array("i")
    for table in tables:
        held += table.held
    return held


def num_held(tables: Tables) -> Counts:
    """How many those are."""
    return tuple(len(table.block_ids) - table.num_gone for table in tables)


def num_lacking(tables: Tables, seen: int, reach: int) -> Counts:
    """Blocks that `extend` of all of them needs."""
    return tuple([table.num_lacking(seen, reach) for table in tables])


def num_slots(tables: Tables) -> int:
    """Tokens that there are places for, whichever of them are seen."""
    return min([len(table.block_ids) * table.group.block_size if table.group.grows else MAX_INT32 for table in tables])


def complete_blocks(tables: Tables, num_tokens: int) -> list[int]:
    """Blocks that are full of the first tokens and stay as they are: what may be copied while others are computed."""
    lasting = (table for table in tables if table.group.is_append_only)
    pieces = (table.block_ids[: num_tokens // table.group.block_size] for table in lasting)
    return list(chain.from_iterable(pieces))


def num_seen(layout: KVLayout, num_tokens: int) -> Counts:
    """Blocks of so many tokens that the last of them sees."""
    return tuple(group.num_places(num_tokens) - group.first_seen(num_tokens) for group in layout.groups)


def num_handed_over(layout: KVLayout, num_tokens: int) -> Counts:
    """Blocks of so many tokens that the next one sees."""
    return tuple(group.num_places(num_tokens) - group.first_seen(num_tokens + 1) for group in layout.groups)


def tables_handed_over(layout: KVLayout, num_tokens: int, blocks: Sequence[Iterable[int]]) -> Tables:
    """Of a sequence of so many tokens that brings those blocks, by group, or is to get them."""
    pairs = zip(layout.groups, blocks, strict=True)
    return [BlockTable(group, block_ids, group.first_seen(num_tokens + 1)) for group, block_ids in pairs]
