"""Block tables of a sequence on the host, a table for each group: the block of each place. Torch-free.

A window group sees only the last places. Earlier blocks of its table are reused for later places. Reuse is safe because
steps run in launch order: the writer of a reused block runs after all its readers.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import Counts, KVGroup, KVLayout

NO_BLOCK = -1
"""Entry of a place out of sight."""


class BlockTable:
    """Blocks of a sequence in a group. Tokens are counted from 1.

    Args:
        block_ids: blocks from place `num_gone` on; int32, as in messages and on devices.
        num_gone: leading places without a block.
    """

    __slots__ = ("block_ids", "group", "num_gone")

    def __init__(self, group: KVGroup, block_ids: Iterable[int], num_gone: int = 0) -> None:
        self.group, self.num_gone = group, num_gone
        self.block_ids = array("i", [NO_BLOCK]) * num_gone
        self.block_ids.extend(block_ids)

    @property
    def held(self) -> "array[int]":
        """Blocks of the table, by place."""
        return self.block_ids[self.num_gone :]

    def num_lacking(self, seen: int, reach: int) -> int:
        """Return the number of fresh blocks needed by `extend`."""
        num_new = self.group.num_places(reach) - len(self.block_ids)
        return max(0, num_new - max(0, self.group.first_seen(seen) - self.num_gone)) if num_new > 0 else 0

    def extend(self, seen: int, reach: int, fresh: Iterable[int] = ()) -> range:
        """Extend the table to `reach` tokens; return the new places.

        Blocks that token `seen` no longer sees are reused first, then `fresh` blocks.
        """
        begin, end = len(self.block_ids), self.group.num_places(reach)
        if begin < end:
            num_spare = min(end - begin, self.group.first_seen(seen) - self.num_gone)
            self.block_ids.extend([self._let_go() for _ in range(num_spare)])
            self.block_ids.extend(islice(fresh, end - len(self.block_ids)))
            assert len(self.block_ids) == end, "who extends a table brings what it lacks"
        return range(begin, max(begin, end))

    def trim(self, seen: int) -> list[int]:
        """Let go of blocks that token `seen` no longer sees, and return them."""
        return [self._let_go() for _ in range(self.num_gone, self.group.first_seen(seen))]

    def _let_go(self) -> int:
        block_id, self.block_ids[self.num_gone] = self.block_ids[self.num_gone], NO_BLOCK
        self.num_gone += 1
        return block_id


Tables = Sequence[BlockTable]
"""Tables of a sequence, by group; empty while the sequence has no blocks."""


def tables_of(layout: KVLayout, blocks: Sequence[Iterable[int]]) -> Tables:
    """Make tables of a sequence from its first blocks, by group."""
    return [BlockTable(group, block_ids) for group, block_ids in zip(layout.groups, blocks, strict=True)]


def held_by(tables: Tables) -> "array[int]":
    """Return all blocks of a sequence, group after group."""
    held = array("i")
    for table in tables:
        held += table.held
    return held


def num_held(tables: Tables) -> Counts:
    """Return the number of blocks of a sequence, by group."""
    return tuple(len(table.block_ids) - table.num_gone for table in tables)


def num_lacking(tables: Tables, seen: int, reach: int) -> Counts:
    """Return the number of fresh blocks needed by `extend` of all tables, by group."""
    return tuple([table.num_lacking(seen, reach) for table in tables])


def num_slots(tables: Tables) -> int:
    """Return the number of tokens with places, seen or not."""
    return min([len(table.block_ids) * table.group.block_size if table.group.grows else MAX_INT32 for table in tables])


def complete_blocks(tables: Tables, num_tokens: int) -> list[int]:
    """Return blocks full of the first tokens and final, so copies may begin before the prompt is complete."""
    lasting = (table for table in tables if table.group.is_append_only)
    pieces = (table.block_ids[: num_tokens // table.group.block_size] for table in lasting)
    return list(chain.from_iterable(pieces))


def num_seen(layout: KVLayout, num_tokens: int) -> Counts:
    """Return the number of blocks seen by the last of `num_tokens` tokens, by group."""
    return tuple(group.num_places(num_tokens) - group.first_seen(num_tokens) for group in layout.groups)


def num_handed_over(layout: KVLayout, num_tokens: int) -> Counts:
    """Return the number of blocks of `num_tokens` tokens seen by the next token, by group."""
    return tuple(group.num_places(num_tokens) - group.first_seen(num_tokens + 1) for group in layout.groups)


def tables_handed_over(layout: KVLayout, num_tokens: int, blocks: Sequence[Iterable[int]]) -> Tables:
    """Make tables of a sequence of `num_tokens` tokens from its handed-over blocks, by group."""
    pairs = zip(layout.groups, blocks, strict=True)
    return [BlockTable(group, block_ids, group.first_seen(num_tokens + 1)) for group, block_ids in pairs]
