"""Block tables of a sequence on the host, a table for each group: the block of each place. Torch-free.

A window group sees only the last places. Earlier blocks of its table are reused for later places, unless sealed. Reuse
is safe because steps run in launch order: the writer of a reused block runs after all its readers. A sealed block is
let go instead. It is freed only after the steps launched so far, because its next writer may be another process.
"""

from array import array
from collections.abc import Container, Iterable, Sequence
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
        sealed: sealed blocks of a window. No step may write them again, so no place reuses them.
    """

    __slots__ = ("block_ids", "gone", "group", "num_gone", "sealed", "spare")

    def __init__(self, group: KVGroup, block_ids: Iterable[int], num_gone: int = 0, sealed: Iterable[int] = ()) -> None:
        self.group, self.num_gone = group, num_gone
        self.block_ids = array("i", [NO_BLOCK]) * num_gone
        self.block_ids.extend(block_ids)
        self.sealed = set(sealed)
        self.spare: list[int] = []  # fresh blocks for places to come
        self.gone: list[int] = []  # sealed blocks let go, which launched steps may still read

    @property
    def held(self) -> "array[int]":
        """Blocks of the table, by place."""
        return self.block_ids[self.num_gone :]

    def num_lacking(self, seen: int, reach: int) -> int:
        """Return the number of fresh blocks needed by `extend`."""
        num_new = self.group.num_places(reach) - len(self.block_ids)
        if num_new <= 0:
            return 0
        out_of_sight = self.block_ids[self.num_gone : self.group.first_seen(seen)]
        num_spare = len(out_of_sight) - len(self.sealed.intersection(out_of_sight) if self.sealed else ())
        return max(0, num_new - num_spare - len(self.spare))

    def extend(self, seen: int, reach: int, fresh: Iterable[int] = ()) -> range:
        """Extend the table to `reach` tokens; return the new places.

        Blocks that token `seen` no longer sees are reused first, unless sealed, then spare and `fresh` blocks.
        """
        begin, end = len(self.block_ids), self.group.num_places(reach)
        first_seen = self.group.first_seen(seen) if self.sealed or begin < end else 0
        while self.num_gone < first_seen:
            if self.block_ids[self.num_gone] in self.sealed:
                self.gone.append(self._let_go())
            elif len(self.block_ids) < end:
                self.block_ids.append(self._let_go())
            else:
                break
        num_spare = min(end - len(self.block_ids), len(self.spare))
        if num_spare > 0:
            self.block_ids.extend(self.spare[:num_spare])
            del self.spare[:num_spare]
        if len(self.block_ids) < end:
            self.block_ids.extend(islice(fresh, end - len(self.block_ids)))
            assert len(self.block_ids) == end, "who extends a table brings what it lacks"
        return range(begin, max(begin, end))

    def lacks_by_sealed(self, end: int, num_tokens: int, most_blocks: int, places: Sequence[int]) -> list[int]:
        """Return the fresh blocks lacking on the way to `num_tokens` if the last n of `places` are sealed, for each n.

        Unsealed places in sight and all places to come need blocks that may be written, at most `most_blocks`.

        Args:
            end: tokens computed so far.
            places: full places, not sealed yet.
        """
        first_seen = max(self.num_gone, self.group.first_seen(end + 1))
        num_unsealed = len(self.block_ids) - self.num_gone - len(self.sealed) + len(self.spare)
        in_sight = self.block_ids[first_seen:]
        num_needed = self.group.num_places(num_tokens) - first_seen
        num_needed -= len(self.sealed.intersection(in_sight)) if self.sealed else 0
        num_seen = sum(place >= first_seen for place in places)
        return [
            max(0, min(most_blocks, num_needed - min(count, num_seen)) - (num_unsealed - count))
            for count in range(len(places) + 1)
        ]

    def trim(self, seen: int) -> list[int]:
        """Let go of spare blocks, and of blocks that token `seen` no longer sees; return them."""
        spare, self.spare = self.spare, []
        return spare + [self._let_go() for _ in range(self.num_gone, self.group.first_seen(seen))]

    def take_gone(self) -> list[int]:
        """Return sealed blocks let go since the last call; free them after the steps that are launched so far."""
        gone, self.gone = self.gone, []
        return gone

    def _let_go(self) -> int:
        block_id, self.block_ids[self.num_gone] = self.block_ids[self.num_gone], NO_BLOCK
        self.num_gone += 1
        self.sealed.discard(block_id)
        return block_id


Tables = Sequence[BlockTable]
"""Tables of a sequence, by group; empty while the sequence has no blocks."""


def tables_of(layout: KVLayout, blocks: Sequence[Iterable[int]]) -> Tables:
    """Make tables of a sequence from its first blocks, by group."""
    return [BlockTable(group, block_ids) for group, block_ids in zip(layout.groups, blocks, strict=True)]


def tables_behind(
    layout: KVLayout, num_tokens: int, num_places: int, found: Sequence[Sequence[int]], fresh: Sequence[Sequence[int]]
) -> Tables:
    """Make tables of a sequence of `num_tokens` tokens, by group: blocks found for its first places, then fresh ones.

    A state has fresh blocks only, because found ones are snapshots.
    """
    tables = []
    for group, here, more in zip(layout.groups, found, fresh, strict=True):
        begin, ours = (num_places - len(here) if group.window else 0), (here if group.grows else ())
        num_fresh = group.num_places(num_tokens) - begin - len(ours)
        table = BlockTable(group, chain(ours, more[:num_fresh]), begin, ours if group.window else ())
        table.spare += more[num_fresh:]
        tables.append(table)
    return tables


def held_by(tables: Tables) -> "array[int]":
    """Return all blocks of a sequence, group after group."""
    held = array("i")
    for table in tables:
        held += table.held
        held.extend([*table.spare, *table.gone])
    return held


def take_gone(tables: Tables) -> list[int]:
    """Return `BlockTable.take_gone` of all tables."""
    return [block_id for table in tables for block_id in table.take_gone()]


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


def tables_handed_over(
    layout: KVLayout, num_tokens: int, blocks: Sequence[Sequence[int]], sealed: Container[int] = ()
) -> Tables:
    """Make tables of a sequence of `num_tokens` tokens from its handed-over blocks, by group; some may be sealed."""
    return [
        BlockTable(
            group,
            block_ids,
            group.first_seen(num_tokens + 1),
            [each for each in block_ids if each in sealed] if group.window else (),
        )
        for group, block_ids in zip(layout.groups, blocks, strict=True)
    ]
